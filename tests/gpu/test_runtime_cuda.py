# SPDX-License-Identifier: Apache-2.0
"""The accelerator runtime on real streams and graphs, CUDA or NPU. It needs no host, only PyTorch.

Delays are work queued on the device, so each test decides which stream is late. What cannot be decided on hardware
(an order that is possible but never happens) is decided on the simulated accelerator, in `tests/runtime`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_speech_accel.runtime import (
    Accelerator,
    GraphCache,
    PinnedStager,
    PlainCounters,
    PrivateStream,
    RuntimeSetupError,
    accelerator_for,
)
from omni_speech_accel.runtime.device_module import DeviceModuleAccelerator

pytestmark = [pytest.mark.gpu, pytest.mark.npu]

REPOSITORY = Path(__file__).resolve().parents[2]
MS = 1e-3
Delay = Callable[[float], None]


@pytest.fixture(scope="module")
def card() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "npu", 0)


@pytest.fixture(scope="module")
def accelerator(card: torch.device) -> Accelerator:
    return accelerator_for(card)


@pytest.fixture(scope="module")
def delay(card: torch.device, accelerator: Accelerator) -> Delay:
    """Queues work of about so many seconds on the current stream."""
    if card.type == "cuda":

        def spin(cycles: int) -> None:
            torch.cuda._sleep(cycles)

        unit = 10_000_000
    else:
        square = torch.randn(2048, 2048, device=card)

        def spin(cycles: int) -> None:
            for _ in range(cycles):
                torch.mm(square, square)

        unit = 100
    spin(unit)
    accelerator.synchronize(card)
    started = time.perf_counter()
    spin(unit)
    accelerator.synchronize(card)
    per_second = unit / (time.perf_counter() - started)
    return lambda seconds: spin(max(1, int(per_second * seconds)))


@pytest.fixture(autouse=True)
def rest(card: torch.device, accelerator: Accelerator) -> Iterator[None]:
    accelerator.synchronize(card)
    yield
    accelerator.synchronize(card)


class Model:
    """[channels, frames] → ([64], [64, frames]): matrix products and many small kernels, as an embedding model has."""

    def __init__(self, card: torch.device, channels: int = 80) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [
            (torch.randn(64, inputs, generator=generator) / inputs**0.5).to(card) for inputs in (channels, 64, 64)
        ]

    def __call__(self, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = mel
        for weight in self.weights:
            hidden = torch.tanh(weight @ hidden)
            hidden = (hidden - hidden.mean(-1, keepdim=True)) * torch.rsqrt(hidden.var(-1, keepdim=True) + 1e-5)
        return hidden.amax(-1), hidden


def features(seed: int, frames: int = 300) -> torch.Tensor:
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(card: torch.device) -> Model:
    return Model(card)


def assert_same(outputs: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        # The library may choose another matrix kernel in a capture, whose workspace differs: rounding, no more.
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)


def counts(cache: GraphCache) -> dict[str, int]:
    assert isinstance(cache.counters, PlainCounters)
    seen = cache.counters.snapshot()
    return {event: int(seen.get(event, 0)) for event in ("captures", "replays", "eager", "failures")}


@contextmanager
def synchronisations_are_errors(card: torch.device) -> Iterator[None]:
    module: Any = torch.cuda if card.type == "cuda" else torch.npu  # type: ignore[attr-defined]
    if not hasattr(module, "set_sync_debug_mode"):
        pytest.skip(f"this {card.type} library cannot report synchronisations")
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


def queued(accelerator: Accelerator, card: torch.device, stream: Any = None) -> Any:
    """An event at the end of what is queued now."""
    event = accelerator.create_event(card)
    accelerator.record_event(event, accelerator.current_stream(card) if stream is None else stream)
    return event


# The graph cache


def test_graph_gives_what_eager_gives(card: torch.device, accelerator: Accelerator, model: Model) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=4)
    for frames in (198, 300, 598):
        for seed in range(4):
            mel = features(seed, frames).to(card)
            assert_same(cache.run(frames, model, mel), model(mel))
    assert counts(cache) == {"captures": 3, "replays": 9, "eager": 0, "failures": 0}
    cache.close()


def test_outputs_of_earlier_requests_stay_as_they_were(
    card: torch.device, accelerator: Accelerator, model: Model
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    mels = [features(seed).to(card) for seed in range(8)]
    outputs = [cache.run(300, model, mel) for mel in mels]
    for mel, output in zip(mels, outputs, strict=True):
        assert_same(output, model(mel))
    cache.close()


@pytest.mark.parametrize("delayed", [0, 1])
def test_two_replicas_with_one_stream_delayed_each_get_their_own_result(
    card: torch.device, accelerator: Accelerator, model: Model, delay: Delay, delayed: int
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    mels = [features(seed).to(card) for seed in range(8)]
    wanted = [model(mel) for mel in mels]
    cache.run(300, model, mels[0])
    accelerator.synchronize(card)
    streams = [accelerator.create_stream(card) for _ in range(2)]
    outputs = []
    for index, mel in enumerate(mels):
        with accelerator.use_stream(streams[index % 2]):
            if index % 2 == delayed:
                delay(20 * MS)
            outputs.append(cache.run(300, model, mel))
    accelerator.synchronize(card)
    for output, want in zip(outputs, wanted, strict=True):
        assert_same(output, want)
    cache.close()


def test_threads_on_streams_of_their_own_each_get_their_own_results(
    card: torch.device, accelerator: Accelerator, model: Model
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=2)
    lengths = (198, 300, 450)
    mels = {(seed, frames): features(seed, frames).to(card) for seed in range(4) for frames in lengths}
    wanted = {key: model(mel) for key, mel in mels.items()}
    accelerator.synchronize(card)
    wrong: list[object] = []

    def replica(seed: int) -> None:
        try:
            stream = accelerator.create_stream(card)
            with accelerator.use_stream(stream), torch.inference_mode(seed % 2 == 0):
                for step in range(60):
                    key = (seed, lengths[step % len(lengths)])
                    output = cache.run(key[1], model, mels[key])
                    accelerator.synchronize_event(queued(accelerator, card))
                    assert_same(output, wanted[key])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=replica, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert cache.graphs == 2
    assert cache.failed_shapes == 0
    cache.close()


def test_warm_replay_waits_for_nothing(
    card: torch.device, accelerator: Accelerator, model: Model, delay: Delay
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    mel = features(1).to(card)
    cache.run(300, model, features(0).to(card))
    accelerator.synchronize(card)
    delay(200 * MS)
    backlog = queued(accelerator, card)
    started = time.perf_counter()
    with synchronisations_are_errors(card):
        output = cache.run(300, model, mel)
    spent = time.perf_counter() - started
    assert not accelerator.event_done(backlog), "the host came back after the backlog"
    assert spent < 50 * MS
    assert_same(output, model(mel))
    cache.close()


@pytest.mark.parametrize("busy", ["the caller's stream", "another stream"])
def test_capture_waits_for_no_stream(
    card: torch.device, accelerator: Accelerator, model: Model, delay: Delay, busy: str
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=2)
    # Kernels are loaded and plans made by another shape: the first of either may stop the device, with or without us.
    cache.run(200, model, features(0, 200).to(card))
    mel = features(1).to(card)
    wanted = model(mel)
    accelerator.synchronize(card)
    stream = accelerator.current_stream(card) if busy == "the caller's stream" else accelerator.create_stream(card)
    with accelerator.use_stream(stream):
        delay(2.0)
        backlog = queued(accelerator, card)
    started = time.perf_counter()
    output = cache.run(300, model, mel)
    print(f"\nfirst use of a length behind 2 s of {busy}: {(time.perf_counter() - started) * 1e3:.1f} ms of host time")
    assert not accelerator.event_done(backlog), "the capture waited for queued work"
    assert counts(cache)["captures"] == 2
    assert_same(output, wanted)
    cache.close()


def test_capture_leaves_other_threads_free_to_allocate(
    card: torch.device, accelerator: Accelerator, model: Model
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    recording, allocated = threading.Event(), threading.Event()

    def fn(mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if accelerator.is_capturing(card):
            recording.set()
            assert allocated.wait(30)
        return model(mel)

    held: list[torch.Tensor] = []

    def allocate() -> None:
        assert recording.wait(30)
        with accelerator.use_stream(accelerator.create_stream(card)):
            held.append(torch.ones(300 << 20, dtype=torch.uint8, device=card))  # larger than any cached block
        allocated.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    mel = features(1).to(card)
    output = cache.run(300, fn, mel)
    thread.join(30)
    assert held
    assert counts(cache) == {"captures": 1, "replays": 0, "eager": 0, "failures": 0}
    assert_same(output, model(mel))
    cache.close()


class LooksAtAValue(Model):
    """Asks the host for a value, which invalidates a capture, so that the driver refuses its end."""

    def __call__(self, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = super().__call__(mel)
        bool(outputs[0].isfinite().all())
        return outputs


class RunsOutOfMemory(Model):
    def __call__(self, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if accelerator_for(mel.device).is_capturing(mel.device):
            torch.empty(1 << 50, dtype=torch.uint8, device=mel.device)
        return super().__call__(mel)


@pytest.mark.parametrize("broken", [LooksAtAValue, RunsOutOfMemory])
def test_failed_capture_runs_eager_and_leaves_the_device_as_it_was(
    card: torch.device, accelerator: Accelerator, model: Model, broken: type[Model]
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    failing = broken(card)
    for seed in range(3):
        mel = features(seed).to(card)
        assert_same(cache.run(300, failing, mel), model(mel))
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 3, "failures": 1}

    # The generator draws again: CFM noise is drawn after every failed capture.
    assert torch.randn(8, device=card).isfinite().all()

    # The allocator reuses blocks that a second stream was recorded on.
    side = accelerator.create_stream(card)
    accelerator.synchronize(card)
    gc.collect()
    before = accelerator.memory_allocated(card)
    for _ in range(20):
        with accelerator.use_stream(side):
            block = torch.empty(32 << 20, dtype=torch.uint8, device=card)
        accelerator.record_stream(block, accelerator.current_stream(card))
        del block
        accelerator.synchronize(card)
    torch.empty(32 << 20, dtype=torch.uint8, device=card)
    assert accelerator.memory_allocated(card) - before < 100 << 20

    # The failure took no slot, and captures work.
    mel = features(1, 200).to(card)
    assert_same(cache.run(200, model, mel), model(mel))
    assert_same(cache.run(200, model, mel), model(mel))
    assert counts(cache) == {"captures": 1, "replays": 1, "eager": 3, "failures": 1}
    cache.close()


def test_a_capture_refused_at_begin_leaves_the_device_as_it_was(
    card: torch.device, accelerator: Accelerator, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Refused after all that the library has set in place: the driver itself cannot be made to refuse.
    begin = DeviceModuleAccelerator._begin
    refusals = ["207008: out of streams"]

    def refused(self: DeviceModuleAccelerator, graph: object, pool: object) -> None:
        begin(self, graph, pool)
        if refusals:
            raise RuntimeError(refusals.pop())

    monkeypatch.setattr(DeviceModuleAccelerator, "_begin", refused)
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    mel = features(1).to(card)
    assert_same(cache.run(300, model, mel), model(mel))
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 1, "failures": 1}
    assert torch.randn(8, device=card).isfinite().all()
    other = features(1, 200).to(card)
    for _ in range(2):
        assert_same(cache.run(200, model, other), model(other))
    assert counts(cache) == {"captures": 1, "replays": 1, "eager": 1, "failures": 1}
    cache.close()


def test_capture_running_on_the_stream_records_the_function_itself(
    card: torch.device, accelerator: Accelerator, model: Model
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    mel = features(0).to(card)
    cache.run(300, model, mel)
    accelerator.prepare_capture(card)
    outer = accelerator.capture(lambda: cache.run(300, model, mel), card, warmups=0)
    mel.copy_(features(5).to(card))
    outer.replay()
    assert_same(outer.outputs, model(mel))
    assert counts(cache)["replays"] == 0
    assert cache.failed_shapes == 0
    cache.close()


def test_memory_comes_back_when_the_cache_is_closed(card: torch.device, accelerator: Accelerator, model: Model) -> None:
    mels = {frames: features(0, frames).to(card) for frames in (1000, 2000, 3000)}
    for mel in mels.values():
        model(mel)
    accelerator.synchronize(card)
    gc.collect()
    before = accelerator.memory_allocated(card)
    cache = GraphCache("test", accelerator, card, max_graphs=3)
    for frames, mel in mels.items():
        cache.run(frames, model, mel)
    assert accelerator.memory_allocated(card) > before
    held = accelerator.memory_allocated(card)
    cache.close()
    accelerator.synchronize(card)
    kept = accelerator.memory_allocated(card) - before
    print(f"\nthree graphs held {(held - before) >> 10} KiB, {kept >> 10} KiB of it stay after close")
    # The matrix library keeps the capture stream's workspace for good: 32 MiB on Hopper, 8 MiB elsewhere.
    assert kept <= 33 << 20


def test_first_use_of_a_length_costs_the_eager_path_and_its_capture(
    card: torch.device, accelerator: Accelerator, model: Model
) -> None:
    cache = GraphCache("test", accelerator, card, max_graphs=16)
    cache.run(64, model, features(0, 64).to(card))

    def timed(work: Callable[[], object]) -> float:
        accelerator.synchronize(card)
        started = time.perf_counter()
        work()
        accelerator.synchronize(card)
        return time.perf_counter() - started

    eager, first, replay = [], [], []
    for frames in range(300, 310):
        mel = features(0, frames).to(card)
        eager.append(timed(lambda mel=mel: model(mel)))  # type: ignore[misc]
        first.append(timed(lambda mel=mel, frames=frames: cache.run(frames, model, mel)))  # type: ignore[misc]
        replay.append(timed(lambda mel=mel, frames=frames: cache.run(frames, model, mel)))  # type: ignore[misc]
    names = {"eager": eager, "first use": first, "replay": replay}
    print("\n" + ", ".join(f"{name} {sorted(times)[5] * 1e3:.2f} ms" for name, times in names.items()))
    assert counts(cache)["captures"] == 11
    cache.close()


# Staging


def test_upload_comes_back_before_the_backlog_is_done(
    card: torch.device, accelerator: Accelerator, delay: Delay
) -> None:
    stager = PinnedStager(accelerator, blocking=False)
    mine = torch.randn(500, 80)
    stager.upload(mine, card)  # the first pinned block of a size is allocated by the driver
    accelerator.synchronize(card)
    delay(100 * MS)
    backlog = queued(accelerator, card)
    wanted = mine.clone()
    started = time.perf_counter()
    with synchronisations_are_errors(card):
        uploaded = stager.upload(mine, card)
    spent = time.perf_counter() - started
    mine.zero_()
    assert not accelerator.event_done(backlog)
    assert spent < 20 * MS
    assert stager.in_flight == 1
    torch.testing.assert_close(uploaded.cpu(), wanted, rtol=0, atol=0)
    assert stager.reclaim() == 1


def test_sources_of_queued_copies_are_not_reused(card: torch.device, accelerator: Accelerator, delay: Delay) -> None:
    stager = PinnedStager(accelerator, blocking=False)
    delay(50 * MS)
    uploaded = [stager.upload(torch.full((1000,), float(index)), card) for index in range(200)]
    for index, tensor in enumerate(uploaded):
        assert (tensor == index).all().item()
    stager.reclaim()
    assert stager.in_flight == 0


def test_blocking_switch_waits(card: torch.device, accelerator: Accelerator, delay: Delay) -> None:
    stager = PinnedStager(accelerator, blocking=True)
    delay(50 * MS)
    backlog = queued(accelerator, card)
    uploaded = stager.upload(torch.ones(5), card)
    assert accelerator.event_done(backlog)
    assert stager.in_flight == 0
    assert uploaded.sum().item() == 5


@pytest.mark.parametrize(
    "mine",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12.0)[::2],
        torch.arange(3).expand(2, 3),
        torch.tensor(4.0),
        torch.tensor([True, False]),
        torch.empty(0, 80),
        torch.arange(4, dtype=torch.float16),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}-{tensor.stride()}",
)
def test_upload_equals_the_plain_transfer(card: torch.device, accelerator: Accelerator, mine: torch.Tensor) -> None:
    uploaded = PinnedStager(accelerator, blocking=False).upload(mine, card)
    plain = mine.to(card)
    assert (uploaded.dtype, uploaded.shape, uploaded.stride(), uploaded.device) == (
        plain.dtype,
        plain.shape,
        plain.stride(),
        plain.device,
    )
    assert torch.equal(uploaded.cpu(), mine)


def test_pinning_a_pinned_tensor_makes_another_copy(accelerator: Accelerator) -> None:
    first = accelerator.pin_memory(torch.ones(4))
    second = accelerator.pin_memory(first)
    assert first.is_pinned()
    assert second.is_pinned()
    assert first.data_ptr() != second.data_ptr()


# The private stream


def test_private_stream_passes_the_callers_backlog(
    card: torch.device, accelerator: Accelerator, model: Model, delay: Delay
) -> None:
    private = PrivateStream(accelerator, card)
    private.run(model, features(0))
    accelerator.synchronize(card)
    finished = []

    def fn(mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(mel)
        finished.append(queued(accelerator, card))
        return outputs

    mel = features(1)
    wanted = model(mel.to(card))
    accelerator.synchronize(card)
    delay(500 * MS)
    backlog = queued(accelerator, card)
    with synchronisations_are_errors(card):
        outputs = private.run(fn, mel)
        joined = queued(accelerator, card)
    accelerator.synchronize_event(finished[0])
    assert not accelerator.event_done(backlog)
    assert not accelerator.event_done(joined), "the caller's stream still has its backlog before the result"
    assert_same(outputs, wanted)


def test_caller_waits_for_a_slow_private_stream(card: torch.device, accelerator: Accelerator, delay: Delay) -> None:
    private = PrivateStream(accelerator, card)

    def slow(value: torch.Tensor) -> torch.Tensor:
        delay(50 * MS)
        return value * 2

    for seed in range(5):
        outputs = private.run(slow, features(seed))
        consumed = outputs + 1
        del outputs
        private.run(slow, features(seed + 100))  # would take the freed block
        torch.testing.assert_close(consumed.cpu(), features(seed) * 2 + 1)


def test_private_stream_waits_for_inputs_of_the_caller(
    card: torch.device, accelerator: Accelerator, delay: Delay
) -> None:
    private = PrivateStream(accelerator, card)
    for seed in range(5):
        source = features(seed).to(card)
        delay(20 * MS)
        late = source * 3
        outputs = private.run(lambda value: value + 1, late)
        del late, source
        torch.testing.assert_close(outputs.cpu(), features(seed) * 3 + 1)


def test_graph_on_the_private_stream_while_callers_are_late(
    card: torch.device, accelerator: Accelerator, model: Model, delay: Delay
) -> None:
    private = PrivateStream(accelerator, card)
    cache = GraphCache("test", accelerator, card, max_graphs=1)
    wanted = [model(features(seed).to(card)) for seed in range(6)]
    accelerator.synchronize(card)
    callers = [accelerator.create_stream(card) for _ in range(2)]
    outputs = []
    for seed in range(6):
        with accelerator.use_stream(callers[seed % 2]):
            if seed % 2:
                delay(10 * MS)
            outputs.append(private.run(lambda mel: cache.run(300, model, mel), features(seed)))
    accelerator.synchronize(card)
    for output, want in zip(outputs, wanted, strict=True):
        assert_same(output, want)
    cache.close()


# The environment

SCENARIO = """
    import torch
    from omni_speech_accel.runtime import GraphCache, PinnedStager, PrivateStream, accelerator_for
    card = torch.device("{card}", 0)
    accelerator = accelerator_for(card)
    weight = torch.randn(64, 80).to(card)
    model = lambda mel: torch.tanh(weight @ mel).mean(-1)
    cache = GraphCache("test", accelerator, card, max_graphs=2)
    stager = PinnedStager(accelerator)
    private = PrivateStream(accelerator, card)
    replicas = [accelerator.create_stream(card) for _ in range(2)]
    torch.{card}.synchronize()
    for step in range(12):
        mel = torch.randn(80, 200 + step % 3)
        with accelerator.use_stream(replicas[step % 2]):
            by_graph = cache.run(mel.shape[1], model, stager.upload(mel, card))
            by_private = private.run(lambda mel: cache.run(mel.shape[1], model, mel), mel)
            torch.testing.assert_close(by_graph, by_private)
            torch.testing.assert_close(by_graph, model(mel.to(card)), rtol=1e-4, atol=1e-5)
    print("captures", cache.graphs)
"""


def run_scenario(card: torch.device, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCENARIO.format(card=card.type))],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_cuda_sanitizer_sees_no_stream_race(card: torch.device) -> None:
    if card.type != "cuda":
        pytest.skip("the stream sanitizer is PyTorch's for CUDA")
    run = run_scenario(card, TORCH_CUDA_SANITIZER="1")
    assert run.returncode == 0, run.stderr
    assert "captures 2" in run.stdout
    assert "data race" not in run.stderr


def test_blocking_launches_are_right_on_cuda_and_refused_on_npu(
    card: torch.device, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if card.type == "cuda":
        run = run_scenario(card, CUDA_LAUNCH_BLOCKING="1")
        assert run.returncode == 0, run.stderr
        assert "captures 2" in run.stdout
    else:
        monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
        cache = GraphCache("test", accelerator, card, max_graphs=1)
        with pytest.raises(RuntimeSetupError, match="ASCEND_LAUNCH_BLOCKING"):
            cache.run(3, lambda value: value + 1, torch.ones(3, device=card))
