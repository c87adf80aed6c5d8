# SPDX-License-Identifier: Apache-2.0
"""Rows of different references in one tensor: what the two grouping items share.

The host's ``setup_batch``, ``decode_batch`` and ``_create_initial_states`` take
a ``PromptFeatures`` whose tensors hold one row per request as readily as one
whose single row they expand: nothing below the stage looks at the reference
itself. So a group is described to the host by such a *stacked* features object,
made from the ones that the host prepared reference by reference.

A stacked object never enters a cache: its key is unique, and only calls that
publish nothing get to see it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from omni_speech_accel.runtime import accelerator_for

_ROWS = "_omni_speech_accel_rows"
_REQUESTS = "_omni_speech_accel_requests"
_PROJECTED = "_omni_speech_accel_projected_speaker"
_STACKED_ID = "omni_speech_accel: stacked"

FREE_MEMORY_SHARE = 0.5
"""Part of the free device memory that one grouped call may take where no cap is set: the rest stays for the vocoder
and for graph captures, whose failure disables graphs for the process."""

RETRY_AFTER = 64
"""Steps after which a group size that ran out of memory is tried again: a minute of a stream's chunks."""

_serial = itertools.count()

logger = logging.getLogger("vllm.omni_speech_accel")


class BackOff:
    """The group size that a stage's memory allows, and what its log has been told. A stage steps on one thread."""

    def __init__(self) -> None:
        self.rows = sys.maxsize
        self._steps = 0
        self._told: set[str] = set()

    def next_step(self) -> None:
        """A step begins; after enough of them the bound is lifted."""
        self._steps -= 1
        if self._steps <= 0:
            self.rows = sys.maxsize

    def failed(self, error: Exception, what: str, rows: int) -> None:
        """``rows`` at once have failed: the first time for its kind of reason, say so; out of memory, hold fewer."""
        reason = type(error).__name__
        if out_of_memory(error):
            reason = "out of memory"
            self.rows, self._steps = min(self.rows, (rows + 1) // 2), RETRY_AFTER
        level = logging.DEBUG if reason in self._told else logging.WARNING
        self._told.add(reason)
        logger.log(level, "omni_speech_accel: %d %s (%s: %s)", rows, what, type(error).__name__, error)


def signature(features: Any) -> Hashable:
    """What two references must share to be rows of one batch: shapes without the row axis, dtypes and devices."""
    tensors = (features.speech_tokens, features.speaker_embedding, features.mels)
    return tuple((tuple(value.shape[1:]), value.dtype, value.device) for value in tensors)


def stack(rows: Sequence[Any], requests: Sequence[tuple[str, ...]] = ()) -> Any:
    """One features object over ``rows``, the features of each request of a batch, in row order.

    Args:
        rows: The host's ``PromptFeatures`` of equal :func:`signature`, one row each; repeats are allowed.
        requests: The request ids of each of the host's own batches that the rows come from, for :func:`requests_of`.

    Returns:
        The host's class with ``speech_tokens`` ``[B, T]``, ``speaker_embedding`` ``[B, 192]`` and ``mels``
        ``[B, F, 80]``; :func:`rows_of` gives ``rows`` back.
    """
    stacked = dataclasses.replace(
        rows[0],
        cache_key=(_STACKED_ID, str(next(_serial))),
        speech_tokens=torch.cat([row.speech_tokens for row in rows]),
        speaker_embedding=torch.cat([row.speaker_embedding for row in rows]),
        mels=torch.cat([row.mels for row in rows]),
    )
    object.__setattr__(stacked, _ROWS, tuple(rows))
    object.__setattr__(stacked, _REQUESTS, tuple(requests))
    return stacked


def rows_of(features: Any) -> tuple[Any, ...] | None:
    """The references behind the rows of a stacked features object; ``None`` for the host's own."""
    rows: tuple[Any, ...] | None = getattr(features, _ROWS, None)
    return rows


def requests_of(features: Any) -> tuple[tuple[str, ...], ...]:
    """The request ids that a stacked features object was made with."""
    requests: tuple[tuple[str, ...], ...] = getattr(features, _REQUESTS, ())
    return requests


def project_speakers(backend: Any, rows: Sequence[Any]) -> torch.Tensor:
    """``[B, C]`` speaker conditioning, each row projected on its own as the host does for one reference.

    One ``[B, 192]`` projection rounds otherwise (about 6e-8), which the Euler steps amplify to about 1e-3 in the mel.
    A row's projection depends on its reference alone, so it is kept with the reference's features.
    """
    return torch.cat([_projected(backend, row) for row in rows])


def _projected(backend: Any, features: Any) -> torch.Tensor:
    found: torch.Tensor | None = features.__dict__.get(_PROJECTED)
    if found is None:
        project: Callable[[torch.Tensor], torch.Tensor] | None = getattr(backend, "_project_speakers", None)
        embedding = features.speaker_embedding
        if project is not None:
            found = project(embedding)
        else:
            found = backend.flow.spk_embed_affine_layer(F.normalize(embedding, dim=1))
        object.__setattr__(features, _PROJECTED, found)
    assert found is not None
    return found


def attention_cache_bytes(backend: Any, frames: int) -> tuple[int, int]:
    """Bytes of one reference's estimator attention cache over ``frames`` mel frames: all Euler steps, and one step.

    The shape is ``[steps, depth, 2, heads, frames, 2 * head_dim]``, the 2 being the rows of classifier-free guidance.
    """
    blocks = backend.flow.decoder.estimator.blocks
    attention = blocks[0].attn
    row = len(blocks) * 2 * int(attention.num_heads) * frames * 2 * int(attention.head_dim)
    kept = row * backend.n_timesteps * _item_bytes(backend._estimator_att_cache_dtype)
    return kept, row * _item_bytes(backend._estimator_att_compute_dtype)


def _item_bytes(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def memory_budget(device: torch.device, max_memory_mib: int | None) -> int | None:
    """Bytes that one grouped call may take: the configured cap, else a share of the free memory, else no bound."""
    if max_memory_mib is not None:
        return max_memory_mib << 20
    free = accelerator_for(device).memory_free(device)
    return None if free is None else int(free * FREE_MEMORY_SHARE)


def out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory; not every backend raises torch's own class for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def replays(backend: Any) -> Hashable:
    """A mark that changes with every whole-solve graph replay.

    Such a replay advances the streams' attention caches in place, so a call that failed after one must not be repeated
    on the same states. Everything else on either host leaves its input states as they were.
    """
    graphs = getattr(backend, "_whole_euler_graph_wrapper", None)
    if graphs is None:
        return None
    stats = graphs.stats_snapshot()
    return stats["hits"], stats["captures"], stats.get("slot_replays")


def graph_per_batch_size(backend: Any) -> bool:
    """Whether the host captures a graph of each Euler step for every batch size that it meets.

    When their number is used up, it drops all of them and captures anew, 0.2 to 0.4 s each: so a group's size should
    be one of few.
    """
    steps = getattr(backend, "_cfm_graph_wrapper", None)
    return steps is not None and bool(getattr(steps, "enabled", True)) and not whole_solve_graphs(backend)


def whole_solve_graphs(backend: Any) -> bool:
    """Whether the host solves a chunk's ten Euler steps in one graph (its Whole-Euler wrapper), batch sizes planned."""
    active = getattr(backend, "_whole_euler_active", None)
    return active is not None and bool(active())


def largest_power_of_two(count: int) -> int:
    """The largest power of two that is at most ``count`` (at least 1)."""
    return 1 << (max(1, count).bit_length() - 1)


def halves(rows: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """``rows`` in two, the larger part first."""
    middle = (len(rows) + 1) // 2
    return rows[:middle], rows[middle:]
