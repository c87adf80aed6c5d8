# SPDX-License-Identifier: Apache-2.0
"""The graph cache on the simulated accelerator: each of its rules as a statement that fails without the rule."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from omni_speech_accel.runtime import Accelerator, GraphCache, PlainCounters, RuntimeSetupError
from omni_speech_accel.runtime import graph_cache as graph_cache_module
from tests.simulator import DEVICE, CaptureError, Schedule, SimulatedDevice, SimulatedStream, SimulatedTensor, read

FRAMES = 6
SEEDS = range(24)
PATIENCE = 0.3  # seconds that a thread is given to do what it must not do
Outputs = tuple[torch.Tensor, torch.Tensor]


def features(seed: int, frames: int = FRAMES) -> torch.Tensor:
    """[2, frames] host features."""
    return torch.randn(2, frames, generator=torch.Generator().manual_seed(seed))


def on_device(value: torch.Tensor) -> torch.Tensor:
    return value.to(DEVICE)


class Model:
    """A pure function with weights, several kernels and two outputs; the same code gives the expected values."""

    def __init__(self, device: torch.device | str = DEVICE) -> None:
        self.weight = torch.arange(1.0, 3.0).view(2, 1).to(device)
        self.calls = 0

    def __call__(self, mel: torch.Tensor) -> Outputs:
        self.calls += 1
        hidden = torch.tanh(mel * self.weight)
        return hidden.mean(-1), (hidden + mel).cumsum(-1)


def expected(mel: torch.Tensor) -> Outputs:
    return Model("cpu")(mel)


def assert_outputs(outputs: Outputs, mel: torch.Tensor) -> None:
    for output, want in zip(outputs, expected(mel), strict=True):
        assert isinstance(output, SimulatedTensor)
        torch.testing.assert_close(read(output), want, rtol=0, atol=0)


@pytest.fixture
def model(device: SimulatedDevice) -> Model:
    return Model()


@pytest.fixture
def cache(accelerator: Accelerator) -> GraphCache:
    return GraphCache("speaker", accelerator, DEVICE, max_graphs=2)


def counts(cache: GraphCache) -> dict[str, int]:
    assert isinstance(cache.counters, PlainCounters)
    seen = cache.counters.snapshot()
    return {event: int(seen.get(event, 0)) for event in ("captures", "replays", "eager", "failures")}


def reasons(cache: GraphCache) -> dict[str, int]:
    """Why calls ran eager."""
    assert isinstance(cache.counters, PlainCounters)
    seen = cache.counters.snapshot()
    return {name[6:]: int(n) for name, n in seen.items() if name.startswith("eager_") and not name.endswith("seconds")}


def warm(device: SimulatedDevice, cache: GraphCache, model: Callable[..., object], frames: int = FRAMES) -> None:
    """Capture the shape and let the device come to rest."""
    cache.run(frames, model, on_device(features(0, frames)))
    device.drain()


class Pause:
    """Holds the thread that submits work to `stream`, after its first operation of the given name."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream, operation: str) -> None:
        self.reached = threading.Event()
        self.resume = threading.Event()
        self._device, self._stream, self._operation = device, stream, operation
        device.on_submit = self._submitted

    def _submitted(self, stream: SimulatedStream, operation: str) -> None:
        # Not in the warm-ups of a first capture, but in the replay after it.
        awaited = stream is self._stream and operation == self._operation and self._device.captures_begun
        if awaited and not self.reached.is_set():
            self.reached.set()
            assert self.resume.wait(10)


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Start a function in a thread; an error in it fails the test."""
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        threads.append(thread)
        thread.start()
        return thread

    yield run
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not errors, errors


Start = Callable[[Callable[[], object]], threading.Thread]


# 1. Operations inside a capture are recorded, not run.


def test_capture_returns_replayed_output_not_pool_memory(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    first, second = features(1), features(2)
    outputs = cache.run(FRAMES, model, on_device(first))
    assert counts(cache) == {"captures": 1, "replays": 0, "eager": 0, "failures": 0}
    assert_outputs(outputs, first)
    # The next replay writes the graph's own outputs anew, not what the first request was given.
    assert_outputs(cache.run(FRAMES, model, on_device(second)), second)
    assert_outputs(outputs, first)


def test_replay_returns_memory_of_the_callers_own(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    warm(device, cache, model)
    results = [(cache.run(FRAMES, model, on_device(features(seed))), features(seed)) for seed in range(4)]
    for outputs, mel in results:
        assert_outputs(outputs, mel)
    assert counts(cache) == {"captures": 1, "replays": 4, "eager": 0, "failures": 0}


def test_replay_runs_no_python_of_the_function(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    warm(device, cache, model)
    calls = model.calls
    cache.run(FRAMES, model, on_device(features(1)))
    assert model.calls == calls


def test_lazy_state_of_the_function_is_made_before_the_recording(device: SimulatedDevice, cache: GraphCache) -> None:
    made: list[torch.Tensor] = []

    def lazy(mel: torch.Tensor) -> torch.Tensor:
        if not made:
            made.append(torch.tensor([3.0]).to(DEVICE))  # an upload that waits: impossible in a capture
        return mel * made[0]

    mel = features(1)
    torch.testing.assert_close(read(cache.run(FRAMES, lazy, on_device(mel))), mel * 3)
    torch.testing.assert_close(read(made[0]), torch.tensor([3.0]))
    assert counts(cache)["failures"] == 0


def test_output_tree_keeps_its_structure_and_its_constants(device: SimulatedDevice, cache: GraphCache) -> None:
    def tree(mel: torch.Tensor) -> dict[str, object]:
        return {"codes": [mel + 1, None], "hop": 40, "same": mel}

    mel = features(1)
    for _ in range(2):
        outputs = cache.run(FRAMES, tree, on_device(mel))
        assert list(outputs) == ["codes", "hop", "same"]
        assert outputs["hop"] == 40
        assert outputs["codes"][1] is None
        torch.testing.assert_close(read(outputs["codes"][0]), mel + 1)
        torch.testing.assert_close(read(outputs["same"]), mel)


# 2. An entry is published only after its first replay and clone succeeded.


def test_first_replay_that_fails_publishes_nothing(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    device.fail("replay")
    mel = features(1)
    assert_outputs(cache.run(FRAMES, model, on_device(mel)), mel)
    assert cache.graphs == 0
    assert_outputs(cache.run(FRAMES, model, on_device(mel)), mel)
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 2, "failures": 1}


def test_first_clone_that_fails_publishes_nothing(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    def out_of_memory_after_replay(stream: SimulatedStream, operation: str) -> None:
        if operation == "aten.cumsum.default" and stream is device.default_stream and device.captures_begun:
            device.on_submit = None
            device.fail("allocate")

    device.on_submit = out_of_memory_after_replay
    mel = features(1)
    assert_outputs(cache.run(FRAMES, model, on_device(mel)), mel)
    assert device.on_submit is None
    assert cache.graphs == 0
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 1, "failures": 1}


def test_other_replica_does_not_see_an_entry_before_its_first_replay(
    device: SimulatedDevice, cache: GraphCache, model: Model, start: Start
) -> None:
    pause = Pause(device, device.default_stream, "aten.cumsum.default")
    capturing = start(lambda: cache.run(FRAMES, model, on_device(features(0))))
    assert pause.reached.wait(10)
    replica = device.create_stream()
    mel = features(1)
    results: list[Outputs] = []

    def call() -> None:
        with device.use_stream(replica):
            results.append(cache.run(FRAMES, model, on_device(mel)))

    other = start(call)
    other.join(PATIENCE)
    assert not other.is_alive()
    assert counts(cache)["eager"] == 1
    pause.resume.set()
    capturing.join(10)
    with device.use_stream(replica):
        assert_outputs(results[0], mel)


# 3. A shape that failed is remembered, logged once with its reason, and takes no slot.


class Uncapturable(Model):
    """Works eagerly; asks the host to look at a value, which no capture can record."""

    def __call__(self, mel: torch.Tensor) -> Outputs:
        outputs = super().__call__(mel)
        bool((outputs[0] > 2).any())
        return outputs


def test_failed_shape_is_remembered_and_logged_once(
    device: SimulatedDevice, cache: GraphCache, caplog: pytest.LogCaptureFixture
) -> None:
    model = Uncapturable()
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            assert_outputs(cache.run(FRAMES, model, on_device(features(seed))), features(seed))
    assert device.captures_begun == 1
    assert cache.failed_shapes == 1
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 3, "failures": 1}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    for part in ("speaker", str(FRAMES), "CaptureError", "needs the host to wait"):
        assert part in messages[0]


@pytest.mark.parametrize("point", ["capture", "capture_end", "replay"])
def test_shape_that_failed_once_runs_eager_for_good(
    device: SimulatedDevice, cache: GraphCache, model: Model, point: str
) -> None:
    device.fail(point)
    for seed in range(3):
        assert_outputs(cache.run(FRAMES, model, on_device(features(seed))), features(seed))
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 3, "failures": 1}


def test_failed_shapes_take_no_slot(device: SimulatedDevice, accelerator: Accelerator, model: Model) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    for frames, point in ((3, "capture"), (4, "capture_end")):
        device.fail(point)
        cache.run(frames, model, on_device(features(0, frames)))
    assert cache.failed_shapes == 2
    warm(device, cache, model)
    assert cache.graphs == 1
    assert_outputs(cache.run(FRAMES, model, on_device(features(1))), features(1))
    assert counts(cache) == {"captures": 1, "replays": 1, "eager": 2, "failures": 2}


def test_thirty_lengths_whose_capture_fails_are_three_attempts_and_as_many_warnings_as_causes(
    device: SimulatedDevice, accelerator: Accelerator, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=8)
    warm(device, cache, model, frames=2)
    device.fail("capture", 30)
    with caplog.at_level(logging.WARNING):
        for frames in range(3, 33):
            assert_outputs(cache.run(frames, model, on_device(features(0, frames))), features(0, frames))
    assert counts(cache) == {"captures": 1, "replays": 0, "eager": 30, "failures": 3}
    assert reasons(cache) == {"failed": 30}
    assert cache.failed_shapes == 3
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "capture failed as the test asked" in messages[0]
    assert "3 captures in a row" in messages[1]
    # A shape that has its graph keeps it.
    assert_outputs(cache.run(2, model, on_device(features(1, 2))), features(1, 2))
    assert counts(cache)["replays"] == 1


def test_failures_with_a_success_between_them_are_not_in_a_row(
    device: SimulatedDevice, accelerator: Accelerator, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=8)
    for frames in range(2, 12):
        if frames % 3:
            device.fail("capture_end")
        cache.run(frames, model, on_device(features(0, frames)))
    assert counts(cache) == {"captures": 3, "replays": 0, "eager": 7, "failures": 7}
    assert len(caplog.records) == 1, "one cause, one warning"


def test_running_out_of_memory_in_a_capture_leaves_the_stream_usable(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    def greedy(mel: torch.Tensor) -> Outputs:
        if device.current_stream.recording is not None:
            device.fail("allocate")
        return model(mel)

    assert_outputs(cache.run(FRAMES, greedy, on_device(features(1))), features(1))
    assert cache.failed_shapes == 1
    warm(device, cache, model, frames=4)
    assert cache.graphs == 1


def test_interrupted_capture_is_no_failure_of_the_shape(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    def interrupted(mel: torch.Tensor) -> Outputs:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.run(FRAMES, interrupted, on_device(features(1)))
    warm(device, cache, model)
    assert cache.graphs == 1


# 4. The graph owns cloned static inputs.


def test_replay_never_writes_a_callers_tensor(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    first = on_device(features(1))
    cache.run(FRAMES, model, first)
    cache.run(FRAMES, model, on_device(features(2)))
    torch.testing.assert_close(read(first), features(1))


def test_graph_does_not_read_a_callers_tensor_that_is_gone(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    first = on_device(features(1))
    cache.run(FRAMES, model, first)
    device.drain()
    del first
    newcomer = torch.full((2, FRAMES), 7.0, device=DEVICE)  # takes the freed block
    mel = features(2)
    assert_outputs(cache.run(FRAMES, model, on_device(mel)), mel)
    assert (read(newcomer) == 7).all()


# 5. Replicas on different streams share the graph's buffers: each use waits for the last one on the device.


def two_replicas(
    device: SimulatedDevice, cache: GraphCache, model: Model, schedule: Schedule, streams: list[SimulatedStream]
) -> None:
    mels = [on_device(features(seed)) for seed in range(6)]
    device.drain()
    device.schedule = schedule
    results: list[tuple[SimulatedStream, Outputs]] = []
    for index, mel in enumerate(mels):
        stream = streams[index % 2]
        with device.use_stream(stream):
            results.append((stream, cache.run(FRAMES, model, mel)))
    for seed, (stream, outputs) in enumerate(results):
        with device.use_stream(stream):
            assert_outputs(outputs, features(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_replicas_with_references_of_one_length_each_get_their_own_result(
    device: SimulatedDevice, cache: GraphCache, model: Model, seed: int
) -> None:
    warm(device, cache, model)
    streams = [device.create_stream("replica0"), device.create_stream("replica1")]
    two_replicas(device, cache, model, Schedule(seed), streams)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_replicas_are_right_while_the_device_works_beside_the_host(
    device: SimulatedDevice, cache: GraphCache, model: Model, seed: int
) -> None:
    warm(device, cache, model)
    streams = [device.create_stream("replica0"), device.create_stream("replica1")]
    two_replicas(device, cache, model, Schedule(seed, eagerness=0.6), streams)


@pytest.mark.parametrize("delayed", [0, 1])
def test_two_replicas_with_one_stream_delayed_each_get_their_own_result(
    device: SimulatedDevice, cache: GraphCache, model: Model, delayed: int
) -> None:
    warm(device, cache, model)
    streams = [device.create_stream("replica0"), device.create_stream("replica1")]
    two_replicas(device, cache, model, Schedule(starved=[streams[delayed]]), streams)


@pytest.mark.parametrize("seed", SEEDS)
def test_replica_that_replays_right_after_the_capture_waits_for_its_first_use(
    device: SimulatedDevice, cache: GraphCache, model: Model, seed: int
) -> None:
    streams = [device.create_stream("replica0"), device.create_stream("replica1")]
    two_replicas(device, cache, model, Schedule(seed), streams)


def test_copy_into_shared_inputs_waits_for_the_replay_that_reads_them(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    warm(device, cache, model)
    slow, fast = device.create_stream("slow"), device.create_stream("fast")
    mels = [on_device(features(1)), on_device(features(2))]
    with device.use_stream(slow):
        slow_outputs = cache.run(FRAMES, model, mels[0])
    with device.use_stream(fast):
        fast_outputs = cache.run(FRAMES, model, mels[1])
    while slow.queue[0].name == "wait":
        device.run(slow)
    device.run(slow)  # the slow replica's reference is in the shared inputs, its graph has yet to run
    assert not fast.runnable
    with device.use_stream(fast):
        assert_outputs(fast_outputs, features(2))
    with device.use_stream(slow):
        assert_outputs(slow_outputs, features(1))


def test_shared_outputs_are_cloned_before_the_next_replica_may_write_them(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    warm(device, cache, model)
    slow, fast = device.create_stream("slow"), device.create_stream("fast")
    mels = [on_device(features(1)), on_device(features(2))]
    with device.use_stream(slow):
        slow_outputs = cache.run(FRAMES, model, mels[0])
    with device.use_stream(fast):
        fast_outputs = cache.run(FRAMES, model, mels[1])
    while slow.pending > 1:  # all but the last clone
        device.run(slow)
    assert not fast.runnable
    with device.use_stream(fast):
        assert_outputs(fast_outputs, features(2))
    with device.use_stream(slow):
        assert_outputs(slow_outputs, features(1))


def test_host_lock_keeps_one_replicas_submission_together(
    device: SimulatedDevice, cache: GraphCache, model: Model, start: Start
) -> None:
    warm(device, cache, model)
    streams = [device.create_stream("replica0"), device.create_stream("replica1")]
    mels = [on_device(features(seed)) for seed in (1, 2)]
    device.drain()
    pause = Pause(device, streams[0], "copy")
    results: dict[int, Outputs] = {}

    def replica(index: int) -> None:
        with device.use_stream(streams[index]):
            results[index] = cache.run(FRAMES, model, mels[index])

    first = start(lambda: replica(0))
    assert pause.reached.wait(10)
    second = start(lambda: replica(1))
    second.join(PATIENCE)
    submitted_meanwhile = streams[1].pending
    pause.resume.set()
    first.join(10)
    second.join(10)
    assert submitted_meanwhile == 0
    for index in (0, 1):
        with device.use_stream(streams[index]):
            assert_outputs(results[index], features(index + 1))


def test_replay_that_fails_halfway_still_protects_the_buffers_it_wrote(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    warm(device, cache, model)
    slow, fast = device.create_stream("slow"), device.create_stream("fast")
    mels = [on_device(features(1)), on_device(features(2))]
    device.fail("replay")
    with device.use_stream(slow), pytest.raises(RuntimeError, match="replay failed"):
        cache.run(FRAMES, model, mels[0])
    with device.use_stream(fast):
        outputs = cache.run(FRAMES, model, mels[1])
        assert slow.pending, "the failed request's copy into the shared inputs is still queued"
        assert not fast.runnable
        assert_outputs(outputs, features(2))


def test_warm_replay_never_makes_the_host_wait(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    warm(device, cache, model)
    mel = on_device(features(1))
    with device.forbid_host_syncs():
        outputs = cache.run(FRAMES, model, mel)
    assert_outputs(outputs, features(1))


def test_capture_never_makes_the_host_wait_nor_other_streams(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    busy = device.create_stream("busy")
    with device.use_stream(busy):
        backlog = torch.zeros(4, device=DEVICE) + 1
    pending = busy.pending
    mel = on_device(features(1))
    with device.forbid_host_syncs():
        outputs = cache.run(FRAMES, model, mel)
    assert_outputs(outputs, features(1))
    assert busy.pending == pending
    with device.use_stream(busy):
        assert (read(backlog) == 1).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_capture_reads_inputs_that_are_still_being_made(
    device: SimulatedDevice, cache: GraphCache, model: Model, seed: int
) -> None:
    state: list[torch.Tensor] = []

    def with_state(mel: torch.Tensor) -> torch.Tensor:
        if not state:
            state.append(mel * 0 + 5)  # what a first call leaves behind for later ones
        return mel + state[0]

    device.schedule = Schedule(seed)
    late = on_device(features(1)) * 2
    outputs = cache.run(FRAMES, with_state, late)
    torch.testing.assert_close(read(outputs), features(1) * 2 + 5)
    # The caller's stream is ordered behind the warm-up that made it.
    torch.testing.assert_close(read(state[0] + 0), torch.full((2, FRAMES), 5.0))


class WithWorkspace(Model):
    """Keeps a scratch buffer per stream, asked for at first use: what a matrix library does behind one's back."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._scratch: dict[SimulatedStream, torch.Tensor] = {}

    def __call__(self, mel: torch.Tensor) -> Outputs:
        stream = self._device.current_stream
        if stream not in self._scratch:
            self._scratch[stream] = torch.empty(2, 16, device=DEVICE)
        scratch = self._scratch[stream][:, : mel.shape[1]]
        torch.mul(mel, self.weight, out=scratch)
        hidden = torch.tanh(scratch)
        return hidden.mean(-1), (hidden + mel).cumsum(-1)


@pytest.mark.parametrize("seed", SEEDS)
def test_graphs_of_different_lengths_share_a_library_workspace_and_never_overlap(
    device: SimulatedDevice, cache: GraphCache, seed: int
) -> None:
    model = WithWorkspace(device)
    lengths = (4, 6)
    mels = [on_device(features(index, lengths[index % 2])) for index in range(6)]
    device.drain()
    device.schedule = Schedule(seed)
    streams = [device.create_stream("replica0"), device.create_stream("replica1")]
    results = []
    for index, mel in enumerate(mels):
        with device.use_stream(streams[index % 2]):
            # The second length is captured while the first one's replay is still queued.
            results.append(cache.run(lengths[index % 2], model, mel))
    for index, outputs in enumerate(results):
        with device.use_stream(streams[index % 2]):
            assert_outputs(outputs, features(index, lengths[index % 2]))
    assert counts(cache) == {"captures": 2, "replays": 4, "eager": 0, "failures": 0}


@pytest.mark.parametrize("seed", SEEDS)
def test_eager_run_of_a_library_with_a_workspace_may_overlap_a_replay(
    device: SimulatedDevice, accelerator: Accelerator, seed: int
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    model = WithWorkspace(device)
    device.schedule = Schedule(seed)
    streams = [device.create_stream("replica0"), device.create_stream("replica1")]
    lengths = (4, 6)
    results = []
    for index in range(6):
        with device.use_stream(streams[index % 2]):
            results.append(cache.run(lengths[index % 2], model, on_device(features(index, lengths[index % 2]))))
    for index, outputs in enumerate(results):
        with device.use_stream(streams[index % 2]):
            assert_outputs(outputs, features(index, lengths[index % 2]))
    assert counts(cache) == {"captures": 1, "replays": 2, "eager": 3, "failures": 0}


def test_first_request_of_a_later_shape_pays_one_eager_run(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    warm(device, cache, model, frames=4)
    first = model.calls
    warm(device, cache, model, frames=5)
    recording = 1
    assert first == 2 + recording
    assert model.calls - first == 1 + recording


# 6. The eager path touches nothing shared.


def test_eager_path_takes_no_lock_while_another_shape_replays(
    device: SimulatedDevice, accelerator: Accelerator, model: Model, start: Start
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    warm(device, cache, model)
    replica = device.create_stream("replica")
    mel, other = on_device(features(1)), features(2, 4)
    pause = Pause(device, replica, "copy")

    def replay() -> None:
        with device.use_stream(replica):
            cache.run(FRAMES, model, mel)

    start(replay)
    assert pause.reached.wait(10)
    results: list[Outputs] = []
    eager = start(lambda: results.append(cache.run(4, model, on_device(other))))
    eager.join(PATIENCE * 10)
    finished = not eager.is_alive()
    pause.resume.set()
    assert finished
    assert_outputs(results[0], other)


def test_eager_path_takes_no_lock_while_another_shape_is_captured(
    device: SimulatedDevice, cache: GraphCache, model: Model, start: Start
) -> None:
    capturing, resume = threading.Event(), threading.Event()

    def slow_to_capture(mel: torch.Tensor) -> Outputs:
        capturing.set()
        assert resume.wait(10)
        return model(mel)

    mel, other = on_device(features(1)), features(2, 4)
    results: list[Outputs] = []
    first = start(lambda: results.append(cache.run(FRAMES, slow_to_capture, mel)))
    assert capturing.wait(10)
    eager = start(lambda: results.append(cache.run(4, model, on_device(other))))
    eager.join(PATIENCE * 10)
    finished = not eager.is_alive()
    resume.set()
    first.join(10)
    assert finished
    assert_outputs(results[0], other)
    assert reasons(cache) == {"busy": 1}
    # Not a failure: the shape gets its graph at its next request.
    assert counts(cache) == {"captures": 1, "replays": 0, "eager": 1, "failures": 0}
    warm(device, cache, model, frames=4)
    assert cache.graphs == 2


def test_eager_path_waits_for_no_event(device: SimulatedDevice, accelerator: Accelerator, model: Model) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    warm(device, cache, model)
    slow = device.create_stream("slow")
    mel, other = on_device(features(1)), on_device(features(2, 4))
    with device.use_stream(slow):
        cache.run(FRAMES, model, mel)
    pending, created = slow.pending, device.events_created
    outputs = cache.run(4, model, other)
    assert_outputs(outputs, features(2, 4))
    assert slow.pending == pending
    assert device.events_created == created


# 7. Lock, event, tables and counters are made with the cache.


def test_nothing_is_made_after_construction(
    device: SimulatedDevice, accelerator: Accelerator, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=2)
    attributes = set(vars(cache))
    counters, created, streams = cache.counters, device.events_created, len(device.streams)
    assert created == 1, "the last-use event"

    make_lock, locks = threading.Lock, []

    def counted_lock() -> object:
        locks.append(make_lock())
        return locks[-1]

    monkeypatch.setattr(graph_cache_module.threading, "Lock", counted_lock)
    warm(device, cache, model)
    ordering = 2  # the capture's own, around the capture stream
    assert device.events_created == created + ordering
    cache.run(FRAMES, model, on_device(features(1)))
    assert device.events_created == created + ordering
    assert len(device.streams) == streams
    assert not locks, "a lock made lazily is two locks for two threads"
    assert set(vars(cache)) == attributes
    assert cache.counters is counters


def test_threads_that_meet_a_new_shape_together_capture_it_once(
    device: SimulatedDevice, cache: GraphCache, model: Model, start: Start
) -> None:
    barrier = threading.Barrier(4)
    results: dict[int, Outputs] = {}
    streams = [device.create_stream() for _ in range(4)]

    def call(index: int) -> None:
        barrier.wait(10)
        with device.use_stream(streams[index]):
            results[index] = cache.run(FRAMES, model, on_device(features(index)))

    threads = [start(lambda index=index: call(index)) for index in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.join(20)
    assert device.captures_begun == 1
    assert cache.graphs == 1
    for index, outputs in results.items():
        with device.use_stream(streams[index]):
            assert_outputs(outputs, features(index))


# 8. The runtime is prepared right before a capture, and a wrong set-up reaches the operator.


def test_every_capture_prepares_the_runtime_anew(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    warm(device, cache, model)
    device.prepared = False  # another stage has changed the process-wide flags meanwhile
    warm(device, cache, model, frames=4)
    assert cache.graphs == 2


def test_wrong_setup_fails_fast_and_is_no_failed_shape(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    device.setup_error = "LAUNCH_BLOCKING=1"
    for _ in range(2):
        with pytest.raises(RuntimeSetupError, match="LAUNCH_BLOCKING"):
            cache.run(FRAMES, model, on_device(features(1)))
    assert cache.failed_shapes == 0
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 0, "failures": 0}
    device.setup_error = None
    warm(device, cache, model)
    assert cache.graphs == 1


def test_setup_is_not_touched_without_a_capture(
    device: SimulatedDevice, accelerator: Accelerator, model: Model
) -> None:
    device.setup_error = "LAUNCH_BLOCKING=1"
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=0)
    assert_outputs(cache.run(FRAMES, model, on_device(features(1))), features(1))


# 9. While another capture is running on this stream: eager.


def test_capture_running_on_the_stream_records_the_function_itself(
    device: SimulatedDevice, accelerator: Accelerator, cache: GraphCache, model: Model
) -> None:
    warm(device, cache, model)
    outer_input = on_device(features(1))
    outer_new_shape = on_device(features(1, 4))
    accelerator.prepare_capture(DEVICE)
    outer = accelerator.capture(
        lambda: (cache.run(FRAMES, model, outer_input), cache.run(4, model, outer_new_shape)), DEVICE, warmups=0
    )
    assert counts(cache) == {"captures": 1, "replays": 0, "eager": 2, "failures": 0}
    assert reasons(cache) == {"outer_capture": 2}
    assert cache.failed_shapes == 0
    for seed in (2, 3):
        outer_input.copy_(on_device(features(seed)))
        outer_new_shape.copy_(on_device(features(seed, 4)))
        outer.replay()
        assert_outputs(outer.outputs[0], features(seed))
        assert_outputs(outer.outputs[1], features(seed, 4))


def test_simulator_refuses_a_capture_within_a_capture(device: SimulatedDevice, accelerator: Accelerator) -> None:
    accelerator.prepare_capture(DEVICE)
    with pytest.raises(CaptureError, match="already"):
        accelerator.capture(lambda: device.begin_capture(), DEVICE, warmups=0)


# 10. What crosses streams is kept alive for its consumer.


def test_cache_dropped_while_a_replica_replays_gives_its_buffers_up_only_afterwards(
    device: SimulatedDevice, accelerator: Accelerator, model: Model
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    warm(device, cache, model)
    mel = on_device(features(1))
    device.drain()
    replica = device.create_stream("replica")
    with device.use_stream(replica):
        outputs = cache.run(FRAMES, model, mel)
    del cache
    newcomers = [torch.full((2, FRAMES), 7.0, device=DEVICE) for _ in range(4)]
    device.wait_for(device.default_stream)
    with device.use_stream(replica):
        assert_outputs(outputs, features(1))
    for newcomer in newcomers:
        assert (read(newcomer) == 7).all(), "the replica's copy into its buffers ran over someone else's tensor"


def test_graph_keeps_the_weights_it_reads_alive(device: SimulatedDevice, cache: GraphCache) -> None:
    warm(device, cache, Model())  # nobody else holds this model
    newcomers = [torch.full((2, 1), 7.0, device=DEVICE) for _ in range(4)]
    device.drain()
    mel = features(1)
    assert_outputs(cache.run(FRAMES, Model(), on_device(mel)), mel)
    del newcomers


def test_close_frees_the_graphs_once_the_device_is_done_with_them(
    device: SimulatedDevice, accelerator: Accelerator, model: Model
) -> None:
    before = device.memory_allocated
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    mel = features(1)
    uploaded = on_device(mel)
    outputs = cache.run(FRAMES, model, uploaded)
    cache.close()
    assert_outputs(outputs, mel)
    assert cache.graphs == 0
    assert_outputs(cache.run(FRAMES, model, uploaded), mel)
    assert counts(cache) == {"captures": 1, "replays": 0, "eager": 1, "failures": 0}
    del outputs, uploaded
    assert device.memory_allocated == before


# 11. The cap bounds the memory.


def test_cap_captures_the_first_shapes_seen_and_runs_the_rest_eager(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    lengths = [4, 5, 6, 7, 4, 5, 6, 7]
    for seed, frames in enumerate(lengths):
        assert_outputs(cache.run(frames, model, on_device(features(seed, frames))), features(seed, frames))
    assert cache.graphs == 2
    assert device.captures_begun == 2
    assert cache.failed_shapes == 0
    assert counts(cache) == {"captures": 2, "replays": 2, "eager": 4, "failures": 0}
    assert reasons(cache) == {"cap": 4}


def test_cap_of_zero_never_captures(device: SimulatedDevice, accelerator: Accelerator, model: Model) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=0)
    for seed in range(2):
        assert_outputs(cache.run(FRAMES, model, on_device(features(seed))), features(seed))
    assert device.captures_begun == 0
    assert counts(cache) == {"captures": 0, "replays": 0, "eager": 2, "failures": 0}


def test_negative_cap_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(ValueError, match="max_graphs"):
        GraphCache("speaker", accelerator, DEVICE, max_graphs=-1)


def test_one_key_with_two_shapes_or_dtypes_is_two_graphs(
    device: SimulatedDevice, accelerator: Accelerator, model: Model
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=4)
    for frames in (4, 5):
        for _ in range(2):
            assert_outputs(cache.run("any", model, on_device(features(1, frames))), features(1, frames))
    double = cache.run("any", model, on_device(features(1, 4).double()))
    assert read(double[0]).dtype == torch.float64
    assert counts(cache) == {"captures": 3, "replays": 2, "eager": 0, "failures": 0}


def test_two_keys_of_one_shape_are_two_graphs(device: SimulatedDevice, cache: GraphCache) -> None:
    mel = features(1)
    for _ in range(2):
        plus = cache.run("plus", lambda x: x + 1, on_device(mel))
        minus = cache.run("minus", lambda x: x - 1, on_device(mel))
        torch.testing.assert_close(read(plus), mel + 1)
        torch.testing.assert_close(read(minus), mel - 1)


# 12. What a graph bakes in is in its key: the precision switches, and whose weights it reads.


class Precise(Model):
    """Other kernels under another precision, as a matrix library has; a recording keeps those that it met."""

    def __call__(self, mel: torch.Tensor) -> Outputs:
        low = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return super().__call__(mel.bfloat16().float() if low else mel)


@pytest.fixture
def _precision_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.conv.fp32_precision
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.conv.fp32_precision = before[1]


@pytest.mark.usefixtures("_precision_as_before")
def test_each_precision_replays_a_graph_of_its_own(device: SimulatedDevice, cache: GraphCache) -> None:
    model = Precise()
    for seed in range(2):
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            mel = features(seed)
            wanted = mel if precision == "highest" else mel.bfloat16().float()
            assert_outputs(cache.run(FRAMES, model, on_device(mel)), wanted)
    assert counts(cache) == {"captures": 2, "replays": 2, "eager": 0, "failures": 0}


@pytest.mark.usefixtures("_precision_as_before")
def test_a_convolutions_precision_is_one_of_the_switches(
    device: SimulatedDevice, cache: GraphCache, model: Model
) -> None:
    for precision in ("ieee", "tf32"):
        torch.backends.cudnn.conv.fp32_precision = precision
        warm(device, cache, model)
    assert cache.graphs == 2


class Scaled(Model):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = self.weight * scale


def assert_scaled(outputs: Outputs, mel: torch.Tensor, scale: float) -> None:
    reference = Model("cpu")
    reference.weight = reference.weight * scale
    torch.testing.assert_close(read(outputs[0]), reference(mel)[0], rtol=0, atol=0)


def test_two_models_of_one_cache_each_replay_their_own_graph(device: SimulatedDevice, cache: GraphCache) -> None:
    models = [Scaled(1.0), Scaled(3.0)]
    for seed in range(3):
        for scale, owner in ((1.0, models[0]), (3.0, models[1])):
            outputs = cache.run(FRAMES, owner, on_device(features(seed)), owner=owner)
            assert_scaled(outputs, features(seed), scale)
    assert counts(cache) == {"captures": 2, "replays": 4, "eager": 0, "failures": 0}


def test_the_graphs_of_a_model_that_is_gone_make_room_for_its_successors(
    device: SimulatedDevice, accelerator: Accelerator
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    for scale in (1.0, 2.0, 3.0):
        model = Scaled(scale)
        for seed in range(2):
            outputs = cache.run(FRAMES, model, on_device(features(seed)), owner=model)
            assert_scaled(outputs, features(seed), scale)
        del model
    assert counts(cache) == {"captures": 3, "replays": 3, "eager": 0, "failures": 0}
    assert cache.graphs == 1


def test_a_model_at_the_address_of_a_dead_one_gets_no_graph_of_it(
    device: SimulatedDevice, accelerator: Accelerator
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=4)
    model = Scaled(1.0)
    cache.run(FRAMES, model, on_device(features(0)), owner=model)
    known, kept = id(model), []
    del model
    for _ in range(200):
        model = Scaled(2.0)
        if id(model) == known:
            break
        kept.append(model)
    else:
        pytest.skip("this Python gave the address to nobody")
    assert_scaled(cache.run(FRAMES, model, on_device(features(1)), owner=model), features(1), 2.0)


def test_the_weights_of_a_dying_model_outlive_the_replays_under_way(device: SimulatedDevice, cache: GraphCache) -> None:
    model = Scaled(2.0)
    cache.run(FRAMES, model, on_device(features(0)), owner=model)
    mel = on_device(features(1))
    device.drain()
    replica = device.create_stream("replica")
    with device.use_stream(replica):
        outputs = cache.run(FRAMES, model, mel, owner=model)
    del model
    newcomers = [torch.full((2, 1), 7.0, device=DEVICE) for _ in range(4)]
    device.wait_for(device.default_stream)
    with device.use_stream(replica):
        assert_scaled(outputs, features(1), 2.0)
    del newcomers


def test_a_failure_belongs_to_its_model(device: SimulatedDevice, cache: GraphCache) -> None:
    first, second = Scaled(1.0), Scaled(2.0)
    device.fail("capture")
    cache.run(FRAMES, first, on_device(features(0)), owner=first)
    cache.run(FRAMES, second, on_device(features(0)), owner=second)
    assert cache.graphs == 1
    assert cache.failed_shapes == 1
    del first
    cache.run(4, second, on_device(features(0, 4)), owner=second)
    assert cache.failed_shapes == 0, "nobody is left whose shape it was"


# What a call may be.


def test_inputs_that_are_no_tensor_or_elsewhere_are_refused(cache: GraphCache, model: Model) -> None:
    with pytest.raises(TypeError, match="int"):
        cache.run(FRAMES, model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cpu"):
        cache.run(FRAMES, model, features(1))


@pytest.mark.parametrize("first_in_inference_mode", [True, False])
def test_graph_serves_requests_in_and_out_of_inference_mode(
    device: SimulatedDevice, cache: GraphCache, model: Model, first_in_inference_mode: bool
) -> None:
    for inference in (first_in_inference_mode, not first_in_inference_mode):
        with torch.inference_mode(inference):
            outputs = cache.run(FRAMES, model, on_device(features(1)))
            assert outputs[0].is_inference() is inference
            assert_outputs(outputs, features(1))
    assert counts(cache) == {"captures": 1, "replays": 1, "eager": 0, "failures": 0}


def test_non_contiguous_input_gives_the_same_values(device: SimulatedDevice, cache: GraphCache, model: Model) -> None:
    wide = features(1, 2 * FRAMES)
    for _ in range(2):
        assert_outputs(cache.run(FRAMES, model, on_device(wide)[:, ::2]), wide[:, ::2])


def test_autocast_runs_eager(device: SimulatedDevice, cache: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    warm(device, cache, model)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "simulated")
    assert_outputs(cache.run(FRAMES, model, on_device(features(1))), features(1))
    assert counts(cache)["eager"] == 1
    assert reasons(cache) == {"autocast": 1}


def test_error_of_the_function_is_the_callers_error(device: SimulatedDevice, cache: GraphCache) -> None:
    def broken(mel: torch.Tensor) -> torch.Tensor:
        raise ValueError("reference is empty")

    with pytest.raises(ValueError, match="reference is empty"):
        cache.run(FRAMES, broken, on_device(features(1)))
