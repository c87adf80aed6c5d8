# SPDX-License-Identifier: Apache-2.0
"""``stop_index_cache``: the talker's stop-index tensor, made once instead of per frame.

Stock builds ``torch.tensor(stop_ids, device=...)`` in ``_censor_stop_logits`` for
every frame of every stream: a blocking host-to-device copy. The tensor only
indexes and is never written, so keeping it changes no bit.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from omni_speech_accel import runtime
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.session import Item

KEY = "stop_index_cache"

MAX_ENTRIES = 64
"""Distinct (stop ids, device) pairs kept; a deployment has a handful, but a client may send arbitrary stop ids."""


class StopIndexCache:
    """Index tensors ``[len(stop_ids)]`` (int64) by stop ids and device. Thread-safe.

    Bounded by keeping the first ``max_entries``: an entry is never dropped, since a graph captured with it, or
    another stream, may still read it.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, stop_ids: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """The kept index, or ``None``."""
        return self._entries.get((stop_ids, device))

    def make(self, stop_ids: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """Make and keep the index; ``None`` where the cache is full.

        The tensor is an ordinary one, also where it is made under inference mode: a caller outside may use it too.
        """
        key = (stop_ids, device)
        with self._lock:
            if key not in self._entries and len(self._entries) >= self._max_entries:
                return None
            if key not in self._entries:
                with torch.inference_mode(False):
                    # A pageable copy: the host waits for it once, so that every stream may read the tensor after.
                    self._entries[key] = torch.tensor(stop_ids, dtype=torch.long, device=device)
            return self._entries[key]


def censor_stop_logits(
    item: Item[ItemOptions],
    wrapped: Any,
    instance: None,
    /,
    logits: torch.Tensor,
    state: Any,
    min_tokens: torch.Tensor,
    *,
    stop_ids: tuple[int, ...],
    eos_window_masked: bool,
) -> Any:
    """Stock's ``_censor_stop_logits`` with the index taken from the stage's cache."""
    counters, cache = item.counters, item.state(StopIndexCache)
    index = cache.find(stop_ids, logits.device)
    counters.inc("misses" if index is None else "hits")
    if index is None and not runtime.accelerator_for(logits.device).is_capturing(logits.device):
        # Not during a capture: the tensor would live in that graph's pool.
        index = cache.make(stop_ids, logits.device)
    if index is None:
        counters.inc("eager")
        return wrapped(logits, state, min_tokens, stop_ids=stop_ids, eos_window_masked=eos_window_masked)
    kept = logits.index_select(-1, index)
    blank = torch.full_like(kept, float("-inf"))
    if not eos_window_masked:
        blank = torch.where((state.step < min_tokens).reshape(1, 1), blank, kept)
    return logits.index_copy(-1, index, blank)
