# SPDX-License-Identifier: Apache-2.0
"""What the device test and the bench of different voices share: cold setups and running streams of a real stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from omni_speech_accel.items import cold_reference_batch
from omni_speech_accel.measure.driver import Code2WavDriver, Payload
from omni_speech_accel.plugin.table import CODE2WAV_MODULE, PATCHES
from omni_speech_accel.synthetic.references import Reference
from tests.gpu import harness

REFERENCE_SECONDS = 6.0  # the stage folds every reference to this: ref_audio_max_seconds


def only(*keys: str, **options: Any) -> dict[str, Any]:
    """A block with just these items on, some with options."""
    return {patch.key: options.get(patch.key, patch.key in keys) for patch in PATCHES}


@contextmanager
def serving(driver: Code2WavDriver) -> Iterator[None]:
    """The modes in which the stage's forward runs: inference, and its matmul precision where the host sets one."""
    policy = getattr(import_module(CODE2WAV_MODULE), "_stage_matmul_policy", None)
    with torch.inference_mode(), nullcontext() if policy is None else policy(driver.model._extra_config()):
        yield


def starting_items(driver: Code2WavDriver, references: Sequence[Reference], name: str) -> list[Any]:
    """The stage's work items of new streams, one per reference, with every reference's features prepared."""
    items = []
    with serving(driver):
        for index, payloads in enumerate(harness.random_streams(name, 1, driver.profile, references)):
            payload = payloads[0]
            segment = torch.tensor(payload.codes, device=driver.device)
            item = driver.model._parse_item(index, payload.stream, segment, payload.info())
            driver.backend.prepare_prompt(item.prompt_cache_id, item.prompt_wav)
            items.append(item)
    return items


def cold_setups(driver: Code2WavDriver, items: Sequence[Any]) -> list[Any]:
    """The initial state of each of ``items``, its reference cold, by the calls that the stage's forward makes."""
    states = []
    with serving(driver):
        driver.backend._setup_cache.clear()
        for bucket in driver.model._iter_decode_batches([[item] for item in items]):
            features = driver.backend.prepare_prompt(bucket[0].prompt_cache_id, bucket[0].prompt_wav)
            if bucket[0].previous is None:
                states += driver.backend.setup_batch(features, len(bucket))
            else:  # joined buckets come with their states
                states += [item.previous.token2wav for item in bucket]
        if driver.session.on(cold_reference_batch.KEY):
            cold_reference_batch.forget(driver.session.item(cold_reference_batch.KEY))
    return states


def state_tensors(state: Any) -> dict[str, torch.Tensor]:
    """A stream's caches by name, resident ones copied out of the host's pool."""
    caches = {**state.flow_cache, **state.hift_cache}
    return {name: value.materialize() if hasattr(value, "materialize") else value for name, value in caches.items()}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over largest magnitude; 0 where both are empty."""
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def state_errors(found: Any, expected: Any) -> dict[str, float]:
    """:func:`relative_error` of each cache of two states.

    Without the two that the vocoder writes: it draws its noise per call, so they differ between any two batches.
    """
    mine, theirs = state_tensors(found), state_tensors(expected)
    return {
        name: relative_error(mine[name], value) for name, value in theirs.items() if name not in ("source", "speech")
    }


def state_error(found: Any, expected: Any) -> float:
    """The largest of :func:`state_errors`."""
    return max(state_errors(found, expected).values())


class RunningStreams:
    """Streams that never end, advanced chunk by chunk together."""

    def __init__(self, driver: Code2WavDriver, references: Sequence[Reference | None], name: str, chunks: int) -> None:
        self._driver = driver
        self.names = [f"{name}{index}" for index in range(len(references))]
        # One chunk more than is asked for: the last one would end the stream.
        self._payloads = harness.random_streams(name, chunks + 1, driver.profile, references)
        self._next = 0

    def chunk(self) -> list[Payload]:
        """The next payload of every stream."""
        payloads = [payloads[self._next] for payloads in self._payloads]
        self._next += 1
        return payloads

    def finish(self) -> None:
        """End the streams as the engine does."""
        self._driver.finish(self.names)
