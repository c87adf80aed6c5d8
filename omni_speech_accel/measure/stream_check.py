# SPDX-License-Identifier: Apache-2.0
"""Streams of different voices through the whole stage, item on and stock side by side, step by step.

Compared are each stream's audio and the state that its next chunk starts from: the
attention caches hold every layer's keys and values of every frame, so a wrong row
shows there before it is heard.

Solving rows together changes their rounding, in the host's own batches too. The
tolerance is that spread, measured here on this device: one voice alone against the
same voice as several rows of stock's own batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_speech_accel.measure.check import Check, block_of
from omni_speech_accel.measure.compare import Difference, compare
from omni_speech_accel.measure.driver import Code2WavDriver, Payload, stream_payloads
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.measure.workbench import Outcome, Workbench, acted, refusal
from omni_speech_accel.plugin.fit import idle_reason
from omni_speech_accel.plugin.table import patch_for
from omni_speech_accel.synthetic.references import Reference, distinct_references
from omni_speech_accel.tolerance import Tolerance

if TYPE_CHECKING:
    import torch

ROWS = 3
# Rounding of a float32 sum in another order, where the host's own batches are bit-stable.
FLOOR = 1e-5
# What the vocoder makes of that rounding. It decides by a threshold whether a frame is voiced, so its output jumps:
# stock's own batches differ by 7e-7 in most voices and by 3e-5 in some, on a CPU.
VOCODER_FLOOR = 1e-4
_VOCODER_OUTPUTS = frozenset({"audio", "speech", "source"})
# The item's batches are of other sizes than the one that the spread was measured with. All that a network makes is
# rounded by the same sums, and one tensor of a few rows can be equal by luck: the spread is each network's widest.
SPREAD_FACTOR = 4.0
# Chunks of the longest stream.
CHUNKS = 3

Step = list[Payload]


def _codes(count: int, start: int) -> list[int]:
    """Codec tokens that differ from frame to frame and stream to stream. 6561: the tokenizer's codebook."""
    return [(start * 977 + index * 131) % 6561 for index in range(count)]


def scenario(profile: StageProfile, references: Sequence[Reference]) -> list[Step]:
    """Steps of five streams: two voices, one of them twice, the default voice, and a third voice that joins late.

    One stream ends early and one on a short chunk, so that batches shrink and rows of unequal length meet.
    """
    first, second, third = references[:3]
    size = profile.chunk_frames
    plans = (
        (0, stream_payloads("first", _codes(CHUNKS * size, 1), profile, first)),
        (0, stream_payloads("second", _codes(2 * size + size // 2, 2), profile, second)),
        (0, stream_payloads("first again", _codes(2 * size, 3), profile, first)),
        (0, stream_payloads("default voice", _codes(CHUNKS * size, 4), profile)),
        (1, stream_payloads("late", _codes(2 * size, 5), profile, third)),
    )
    steps: list[Step] = [[] for _ in range(max(start + len(payloads) for start, payloads in plans))]
    for start, payloads in plans:
        for index, payload in enumerate(payloads):
            steps[start + index].append(payload)
    return steps


def _state(driver: Code2WavDriver, stream: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors that the stream's next chunk starts from."""
    import torch

    state = driver.model._states.get(stream)
    if state is None:
        return
    for group in (state.token2wav.flow_cache, state.token2wav.hift_cache):
        for name, value in sorted(group.items()):
            tensor = value.materialize() if hasattr(value, "materialize") else value
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                yield name, tensor


def _solve_together(driver: Code2WavDriver) -> Any:
    """Make stock solve the initial state of all rows of a prompt as one batch, which its API allows."""
    backend = driver.backend

    def setup_batch(features: Any, batch_size: int) -> Any:
        return backend._create_initial_states(features, batch_size)

    backend.setup_batch = setup_batch


def _spread(
    driver: Code2WavDriver, profile: StageProfile, voices: Sequence[Reference | None], chunks: int
) -> dict[str, float]:
    """Largest relative difference, by name, between a row alone and the same row in stock's own batch.

    Every voice is asked, over as many chunks as the streams have: rounding grows from chunk to chunk, and the vocoder's
    phase makes more of it in one voice than in another.
    """
    from omni_speech_accel.measure.noise import RowIndependentNoise

    worst: dict[str, float] = {}

    def note(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        worst[name] = max(worst.get(name, 0.0), compare(name, expected, found).relative)

    with RowIndependentNoise():
        for number, voice in enumerate(voices):
            codes = _codes(chunks * profile.chunk_frames, number + 1)
            alone = stream_payloads("alone", codes, profile, voice)
            rows = [stream_payloads(f"row {row}", codes, profile, voice) for row in range(ROWS)]
            for index, payload in enumerate(alone):
                (audio,) = driver.step([payload])
                driver.backend._setup_cache.clear()
                _solve_together(driver)
                try:
                    found = driver.step([row[index] for row in rows])
                finally:
                    del driver.backend.setup_batch
                driver.backend._setup_cache.clear()
                expected = dict(_state(driver, payload.stream))
                for row, other in zip(rows, found, strict=True):
                    note("audio", audio, other)
                    for name, value in _state(driver, row[index].stream):
                        note(name, expected[name], value)
            driver.finish([payload[0].stream for payload in (alone, *rows)])
    return worst


def _tolerance(name: str, spread: Mapping[str, float]) -> Tolerance:
    vocoder = name in _VOCODER_OUTPUTS
    widest = max((value for other, value in spread.items() if (other in _VOCODER_OUTPUTS) == vocoder), default=0.0)
    return Tolerance(max(VOCODER_FLOOR if vocoder else FLOOR, SPREAD_FACTOR * widest))


def _compare_step(
    step: Step, stock: Code2WavDriver, ours: Code2WavDriver, spread: Mapping[str, float]
) -> Iterator[Difference]:
    expected, found = stock.step(step), ours.step(step)
    running = [payload.stream for payload in step if not payload.last]
    for driver in (stock, ours):
        driver.check_references(running)
    for payload, first, second in zip(step, expected, found, strict=True):
        label = f"{payload.stream}, chunk {payload.sequence}"
        yield compare(f"{label}: audio", first, second, _tolerance("audio", spread))
        state = dict(_state(stock, payload.stream))
        for name, value in _state(ours, payload.stream):
            yield compare(f"{label}: {name}", state[name], value, _tolerance(name, spread))


def check_streams(bench: Workbench, item: str, check: Check) -> Outcome:
    """Drive the same streams through stock and through the item, and compare after every step."""
    from omni_speech_accel.measure.noise import RowIndependentNoise

    references = distinct_references(3, bench.profile.reference_seconds)
    bench.progress("stock: building the stage")
    stock: Code2WavDriver = bench.once("stock stage", lambda: Code2WavDriver(bench.model, bench.profile))
    bench.progress("stock: spread over batch sizes")
    spread: dict[str, float] = bench.once("spread", lambda: _spread(stock, bench.profile, (*references, None), CHUNKS))
    bench.progress(f"{item}: building the stage")
    ours = Code2WavDriver(bench.model, bench.profile, block=block_of(*check.beside, item))
    differences: list[Difference] = []
    steps = scenario(bench.profile, references)
    streams = sorted({payload.stream for step in steps for payload in step})
    try:
        with RowIndependentNoise():
            for number, step in enumerate(steps):
                bench.progress(f"{item}: step {number + 1} of {len(steps)}")
                differences += _compare_step(step, stock, ours, spread)
        refused, native = refusal(ours.session, item)
        idle = idle_reason(patch_for(item), ours.backend)
        counters = ours.session.snapshot().get(item, {})
    finally:
        stock.finish(streams)
        ours.close()
    note = (
        f"tolerance: {SPREAD_FACTOR:g} times stock's own widest spread over batch sizes, here "
        f"{_tolerance('mel', spread)} for the flow's states and {_tolerance('audio', spread)} for the vocoder's output"
    )
    return Outcome(tuple(differences), refused, native, acted(counters, check.acted), idle, counters, (note,))
