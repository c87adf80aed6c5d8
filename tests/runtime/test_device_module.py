# SPDX-License-Identifier: Apache-2.0
"""How the CUDA and NPU backends drive their library, on a stand-in that writes down what it is told.

That the library then does what is wanted is shown on the devices, in `tests/gpu/test_runtime_cuda.py`.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel.runtime import RuntimeSetupError
from omni_speech_accel.runtime.cuda import CudaAccelerator
from omni_speech_accel.runtime.device_module import DeviceModuleAccelerator
from omni_speech_accel.runtime.npu import NpuAccelerator

DEVICE = torch.device("cpu", 0)


# The steps of the library's `capture_begin`, in order; what a step has set in place stays when a later one fails.
BEGIN_STEPS = ("check", "generator", "filter", "driver", "status")


class Generator:
    """Whether it is in its capture state; a copy never is."""

    def __init__(self) -> None:
        self.capturing = False

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_set_state(self, other: Generator) -> None:
        self.capturing = other.capturing


class Library:
    """`torch.cuda` / `torch.npu` as far as the backends use it; anything else is an AttributeError."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.refuses_capture_end = 0
        self.refuses_begin_at = ""
        self.begins_refused = 0
        self.collecting_in_capture: bool | None = None
        self.config = SimpleNamespace(allow_internal_format=True)
        self.matmul, self.conv = SimpleNamespace(allow_hf32=False), SimpleNamespace(allow_hf32=True)
        self.default_generators = (Generator(),)
        self.filters: dict[str, weakref.ref[Any]] = {}  # pool to the graph that its filter asks
        self.capturing: set[str] = set()
        self._stream = "caller"
        self._pools = 0
        library = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                library.log.append(f"begin {pool} {capture_error_mode} on {library._stream}")
                library.collecting_in_capture = gc.isenabled()
                self.pool = pool
                for step in BEGIN_STEPS:
                    if step == library.refuses_begin_at and library.begins_refused:
                        library.begins_refused -= 1
                        raise RuntimeError("207008: out of streams")
                    if step == "generator":
                        library.default_generators[0].capturing = True
                    elif step == "filter":
                        library.filters[pool] = weakref.ref(self)
                    elif step == "driver":
                        library.capturing.add(library._stream)

            def capture_end(self) -> None:
                assert library._stream in library.capturing, "an end without a begin aborts in the library"
                library.capturing.discard(library._stream)
                if library.refuses_capture_end:
                    library.refuses_capture_end -= 1
                    library.log.append("end refused")
                    raise RuntimeError("capture invalidated")
                library.log.append("end")
                del library.filters[self.pool]
                library.default_generators[0].capturing = False

            def replay(self) -> None:
                library.log.append("replay")

        class Event:
            def __init__(self) -> None:
                self.at = ""

            def record(self, stream: str) -> None:
                self.at = stream

        class Stream(str):
            def wait_event(self, event: Event) -> None:
                library.log.append(f"{self} waits for {event.at}")

        self.NPUGraph = self.CUDAGraph = Graph
        self.Event = Event
        self.Stream = lambda device: Stream("side")
        self._caller = Stream("caller")

    def graph_pool_handle(self) -> str:
        self._pools += 1
        return f"pool{self._pools}"

    def current_stream(self, device: Any) -> Any:
        return self._caller

    def current_device(self) -> int:
        return 0

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def is_current_stream_capturing(self) -> bool:
        return self._stream in self.capturing

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self._stream = stream
        try:
            yield
        finally:
            self._stream = "caller"

    def set_compile_mode(self, jit_compile: bool) -> None:
        self.log.append(f"jit_compile={jit_compile}")


def assert_as_before(library: Library) -> None:
    """No capture is under way for the driver, the allocator, the generator, the thread or the collector."""
    assert not library.capturing
    assert not library.filters
    assert not library.default_generators[0].capturing
    assert library._stream == "caller"
    assert gc.isenabled()


class Backend(DeviceModuleAccelerator):
    device_type = "cpu"
    supports_graphs = True

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._library = library

    def prepare_capture(self, device: Any) -> None:
        raise NotImplementedError

    def _new_graph(self) -> Any:
        return self._library.CUDAGraph()

    def _forget_pool(self, device: torch.device, pool: Any) -> None:
        self._library.log.append(f"forget {pool}")
        self._library.filters.pop(pool, None)


@pytest.fixture
def library() -> Library:
    return Library()


def test_capture_warms_up_on_the_callers_stream_and_records_on_its_own(library: Library) -> None:
    calls: list[str] = []

    def fn() -> str:
        calls.append(library._stream)
        library.log.append("fn")
        return "outputs"

    graph = Backend(library).capture(fn, DEVICE)
    assert library.log == [
        "fn",
        "fn",
        "side waits for caller",
        "begin pool1 thread_local on side",
        "fn",
        "end",
        "caller waits for side",
    ]
    assert calls == ["caller", "caller", "side"]
    assert graph.outputs == "outputs"
    graph.replay()
    assert library.log[-1] == "replay"


def test_each_capture_has_a_pool_of_its_own(library: Library) -> None:
    backend = Backend(library)
    for _ in range(2):
        backend.capture(lambda: None, DEVICE, warmups=0)
    pools = [entry.split()[1] for entry in library.log if entry.startswith("begin")]
    assert pools == ["pool1", "pool2"]


def test_collector_rests_during_the_recording_alone(library: Library) -> None:
    assert gc.isenabled()
    Backend(library).capture(lambda: None, DEVICE)
    assert library.collecting_in_capture is False
    assert gc.isenabled()
    gc.disable()
    try:
        Backend(library).capture(lambda: None, DEVICE)
        assert not gc.isenabled()
    finally:
        gc.enable()


def recorded_only(library: Library, error: BaseException) -> Any:
    def fn() -> None:
        if library.log and library.log[-1].startswith("begin"):
            raise error

    return fn


def test_error_while_recording_ends_the_capture_and_is_the_error_raised(library: Library) -> None:
    with pytest.raises(ValueError, match="mine"):
        Backend(library).capture(recorded_only(library, ValueError("mine")), DEVICE)
    assert library.log[-2:] == ["end", "caller waits for side"]
    assert gc.isenabled()


@pytest.mark.parametrize("fn_fails", [True, False])
def test_capture_whose_end_is_refused_is_undone(library: Library, fn_fails: bool) -> None:
    library.refuses_capture_end = 1
    fn = recorded_only(library, ValueError("mine")) if fn_fails else (lambda: None)
    with pytest.raises(ValueError if fn_fails else RuntimeError, match="mine" if fn_fails else "invalidated"):
        Backend(library).capture(fn, DEVICE)
    # The allocator is told, and a smallest capture that succeeds takes the generator out of its capture state.
    assert library.log[-5:] == [
        "end refused",
        "forget pool1",
        "begin pool2 thread_local on side",
        "end",
        "caller waits for side",
    ]
    assert gc.isenabled()


@pytest.mark.parametrize("step", BEGIN_STEPS)
def test_a_capture_refused_at_begin_is_undone(library: Library, step: str) -> None:
    library.refuses_begin_at, library.begins_refused = step, 1
    backend = Backend(library)
    with pytest.raises(RuntimeError, match="out of streams"):
        backend.capture(lambda: pytest.fail("recorded although refused"), DEVICE, warmups=0)
    assert_as_before(library)
    assert backend.capture(lambda: "outputs", DEVICE, warmups=0).outputs == "outputs"
    assert_as_before(library)


def test_a_capture_that_the_driver_had_begun_is_ended_by_its_own_graph(library: Library) -> None:
    library.refuses_begin_at, library.begins_refused = "status", 1
    with pytest.raises(RuntimeError, match="out of streams"):
        Backend(library).capture(lambda: None, DEVICE, warmups=0)
    assert [entry for entry in library.log if "waits" not in entry] == ["begin pool1 thread_local on side", "end"]


@pytest.mark.parametrize("step", BEGIN_STEPS)
def test_a_driver_that_refuses_every_begin_leaves_the_generator_usable(library: Library, step: str) -> None:
    library.refuses_begin_at, library.begins_refused = step, 100
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of streams"):
            Backend(library).capture(lambda: None, DEVICE, warmups=0)
        assert_as_before(library)


def test_a_refused_graph_lives_on_for_the_filters_that_ask_it(library: Library) -> None:
    library.refuses_begin_at, library.begins_refused = "driver", 1
    backend = Backend(library)
    asked: list[weakref.ref[Any]] = []
    backend._forget_pool = lambda device, pool: asked.append(library.filters.pop(pool))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of streams"):
        backend.capture(lambda: None, DEVICE, warmups=0)
    gc.collect()
    assert asked[0]() is not None


def test_the_collector_rests_until_the_last_of_several_captures_is_done(library: Library) -> None:
    inner_done, moment = threading.Event(), threading.Event()
    seen: list[bool] = []

    def outer() -> None:
        seen.append(gc.isenabled())
        inner_done.wait(10)
        seen.append(gc.isenabled())

    thread = threading.Thread(target=lambda: Backend(library).capture(outer, DEVICE, warmups=0))
    thread.start()
    while not seen:
        moment.wait(0.001)
    Backend(Library()).capture(lambda: None, DEVICE, warmups=0)
    inner_done.set()
    thread.join(10)
    assert seen == [False, False]
    assert gc.isenabled()


def test_failure_to_undo_does_not_hide_the_reason(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    library.refuses_capture_end = 2
    library.default_generators[0].graphsafe_set_state = None  # type: ignore[assignment,method-assign]
    with pytest.raises(ValueError, match="mine"):
        Backend(library).capture(recorded_only(library, ValueError("mine")), DEVICE)
    assert "could not be undone" in caplog.text


def test_error_in_a_warmup_begins_no_capture(library: Library) -> None:
    def fn() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Backend(library).capture(fn, DEVICE)
    assert library.log == []


# CUDA


class Allocator:
    def __init__(self, refuses: str = "") -> None:
        self.log: list[tuple[str, int, str]] = []
        self._refuses = refuses

    def call(self, name: str) -> Any:
        def record(device: int, pool: str) -> None:
            if name == self._refuses:
                raise RuntimeError("not recording to this pool")
            self.log.append((name, device, pool))

        return record


@pytest.mark.parametrize("refuses", ["", "end"])
def test_cuda_releases_a_failed_pool_only_if_the_library_has_not(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    allocator = Allocator(refuses)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.call("end"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.call("release"), raising=False)
    CudaAccelerator()._forget_pool(torch.device("cuda", 1), "pool")
    assert allocator.log == ([] if refuses else [("end", 1, "pool"), ("release", 1, "pool")])


def test_cuda_launch_blocking_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    CudaAccelerator().prepare_capture("cuda:0")


# NPU


@pytest.fixture
def npu(library: Library, monkeypatch: pytest.MonkeyPatch) -> NpuAccelerator:
    module = ModuleType("torch_npu")
    module.npu = library  # type: ignore[attr-defined]
    module._C = SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    for variable in ("ASCEND_LAUNCH_BLOCKING", "TASK_QUEUE_ENABLE", "OMNI_SPEECH_ACCEL_BLOCKING_COPY"):
        monkeypatch.delenv(variable, raising=False)
    return NpuAccelerator()


def test_npu_prepares_the_runtime_for_a_capture(npu: NpuAccelerator, library: Library) -> None:
    npu.prepare_capture("npu:0")
    assert library.config.allow_internal_format is False
    assert library.log == ["jit_compile=False"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ASCEND_LAUNCH_BLOCKING", "1"),
        ("ASCEND_LAUNCH_BLOCKING", " 1 "),
        ("TASK_QUEUE_ENABLE", "2"),
        ("TASK_QUEUE_ENABLE", " 2"),
        ("OMNI_SPEECH_ACCEL_BLOCKING_COPY", "maybe"),
    ],
)
def test_npu_refuses_a_setting_that_rules_captures_out_and_names_it(
    npu: NpuAccelerator, library: Library, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for check in (npu.check_setup, npu.prepare_capture):
        with pytest.raises(RuntimeSetupError, match=f"{variable}={value.strip()}"):
            check("npu:0")
    assert library.config.allow_internal_format is True, "nothing is set where nothing will be captured"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ASCEND_LAUNCH_BLOCKING", "0"), ("ASCEND_LAUNCH_BLOCKING", "")]
    + [("TASK_QUEUE_ENABLE", value) for value in "01"],
)
def test_npu_takes_settings_that_captures_work_under(
    npu: NpuAccelerator, library: Library, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    npu.check_setup("npu:0")
    assert library.log == [], "a check sets nothing"
    npu.prepare_capture("npu:0")


def test_npu_precision_has_its_hf32_switches(npu: NpuAccelerator, library: Library) -> None:
    before = npu.precision()
    library.matmul.allow_hf32 = True
    assert npu.precision() != before


def test_npu_without_graph_support_has_no_graphs(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    del library.NPUGraph
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=library, _C=SimpleNamespace()))
    assert not NpuAccelerator().supports_graphs


def test_npu_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ImportError, match="torch_npu"):
        NpuAccelerator()


@pytest.mark.parametrize("end", ["_npu_endAllocateToPool", "_npu_endAllocateCurrentStreamToPool", ""])
def test_npu_releases_a_failed_pool_where_its_library_can(npu: NpuAccelerator, end: str) -> None:
    allocator = Allocator()
    if end:
        setattr(npu._torch_npu._C, end, allocator.call("end"))
        npu._torch_npu._C._npu_releasePool = allocator.call("release")
    npu._forget_pool(torch.device("cuda", 1), "pool")
    assert allocator.log == ([("end", 1, "pool"), ("release", 1, "pool")] if end else [])
