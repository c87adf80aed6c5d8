# SPDX-License-Identifier: Apache-2.0
"""The simulated device itself: streams, their scheduler, and memory. Knows nothing of tensors' operators."""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

POISON_BYTE = 0xFF  # NaN in every float format, -1 in every signed integer
BLOCK = 512  # bytes; sizes are rounded up to it, so that freed blocks find a new owner easily


class CaptureError(RuntimeError):
    """An operation that no capture can record."""


class SynchronisedError(RuntimeError):
    """The host waited for the device where the test forbids it."""


class SimulatedFault(RuntimeError):
    """A failure that the test asked for."""


@dataclass
class Gate:
    """A point in a stream: reached once that stream has run `position` operations."""

    stream: SimulatedStream
    position: int

    @property
    def reached(self) -> bool:
        return self.stream.executed >= self.position


@dataclass
class Operation:
    name: str
    run: Callable[[], Any] | None = None
    gate: Gate | None = None


class SimulatedStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Operation] = deque()
        self.submitted = 0
        self.executed = 0
        self.recording: Recording | None = None

    @property
    def pending(self) -> int:
        return len(self.queue)

    @property
    def runnable(self) -> bool:
        return bool(self.queue) and (self.queue[0].gate is None or self.queue[0].gate.reached)

    def __repr__(self) -> str:
        return f"<stream {self.name}: {self.pending} pending>"


class SimulatedEvent:
    def __init__(self) -> None:
        self.gate: Gate | None = None


class Block:
    """Raw memory, and who may still be reading it after it is freed."""

    def __init__(self, nbytes: int, home: object) -> None:
        self.raw = torch.full((nbytes,), POISON_BYTE, dtype=torch.uint8)
        self.home = home
        self.users: set[SimulatedStream] = set()
        self.release: list[Gate] = []

    def poison(self) -> None:
        self.raw.fill_(POISON_BYTE)


class Lease:
    """Held by every tensor on a block; when the last one goes, the block is free."""

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: Block) -> None:
        self.block = block


@dataclass
class Recording:
    operations: list[Operation] = field(default_factory=list)
    # Home of the blocks of this graph's private pool: no stream, so that no stream is handed them.
    pool: object = field(default_factory=object)


class RecordedGraph:
    def __init__(self, device: SimulatedDevice, recording: Recording, outputs: Any) -> None:
        self._device = device
        self._recording = recording
        self.outputs = outputs

    def replay(self) -> None:
        self._device.trip("replay")
        for operation in self._recording.operations:
            self._device.submit(operation.name, operation.run)


class Schedule:
    """In which order the device does what it may do.

    Args:
        seed: None: the laziest device, only what the waiting host needs is run. A number: at random.
        starved: streams that run only when nothing else can.
        eagerness: chance, after each submission, that the device runs an operation; repeated until it does not.
    """

    def __init__(
        self, seed: int | None = None, starved: Iterable[SimulatedStream] = (), eagerness: float = 0.0
    ) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._starved = set(starved)
        self._eagerness = eagerness

    def keep_going(self) -> bool:
        return self._random is not None and self._random.random() < self._eagerness

    def choose(self, runnable: list[SimulatedStream], needed: list[SimulatedStream]) -> SimulatedStream:
        others = [stream for stream in runnable if stream not in self._starved]
        if self._random is not None:
            return self._random.choice(others or runnable)
        if self._starved and others:
            return others[0]
        return needed[0]


class _PinnedArray(np.ndarray[Any, Any]):
    """Memory of a pinned tensor; a class of its own, because a plain array takes no weak reference callback."""


class SimulatedDevice:
    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule or Schedule()
        self.default_stream = SimulatedStream("default")
        self.streams = [self.default_stream]
        self.host_syncs: list[str] = []
        self.prepared = False
        self.setup_error: str | None = None
        self.on_submit: Callable[[SimulatedStream, str], None] | None = None
        self.events_created = 0
        self.captures_begun = 0
        self._syncs_forbidden = False
        self._faults: dict[str, int] = {}
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._free: list[Block] = []
        self._freed: deque[Block] = deque()
        self._live = 0
        self._pinned: dict[int, tuple[int, torch.Tensor]] = {}

    # --- streams and events

    @property
    def current_stream(self) -> SimulatedStream:
        stream: SimulatedStream = getattr(self._thread, "stream", self.default_stream)
        return stream

    @contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        before = self.current_stream
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def create_stream(self, name: str | None = None) -> SimulatedStream:
        with self._lock:
            stream = SimulatedStream(name or f"stream{len(self.streams)}")
            self.streams.append(stream)
            return stream

    def create_event(self) -> SimulatedEvent:
        self.events_created += 1
        return SimulatedEvent()

    def record_event(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        if stream.recording is not None:
            raise CaptureError("an event recorded in a capture cannot be waited for outside it")
        event.gate = Gate(stream, stream.submitted)

    def wait_event(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        if event.gate is None:
            return
        if stream.recording is not None:
            raise CaptureError("a captured stream cannot depend on work outside the capture")
        self._enqueue(stream, Operation("wait", gate=event.gate))

    def submit(self, name: str, run: Callable[[], Any] | None, stream: SimulatedStream | None = None) -> None:
        """Queue an operation on `stream`, by default the thread's current one (or record it)."""
        stream = stream or self.current_stream
        if stream.recording is not None:
            stream.recording.operations.append(Operation(name, run))
        else:
            self._enqueue(stream, Operation(name, run))

    def _enqueue(self, stream: SimulatedStream, operation: Operation) -> None:
        with self._lock:
            stream.queue.append(operation)
            stream.submitted += 1
            while self.schedule.keep_going() and self._step([]):
                pass
        if self.on_submit is not None:
            self.on_submit(stream, operation.name)

    # --- running

    def _step(self, needed: list[SimulatedStream]) -> bool:
        runnable = [stream for stream in self.streams if stream.runnable]
        if not runnable:
            return False
        self._run_head(self.schedule.choose(runnable, needed or runnable))
        return True

    def _run_head(self, stream: SimulatedStream) -> None:
        operation = stream.queue.popleft()
        if operation.run is not None:
            # Raw memory may have been made in inference mode; only in it may such memory be written.
            with torch.inference_mode():
                operation.run()
        stream.executed += 1

    def run(self, stream: SimulatedStream, operations: int = 1) -> None:
        """Let the device run the next `operations` of one stream, for a test that wants one exact order."""
        with self._lock:
            for _ in range(operations):
                assert stream.runnable, f"{stream} has nothing that can run"
                self._run_head(stream)

    def _run_until(self, gate: Gate) -> None:
        with self._lock:
            while not gate.reached:
                if not self._step(self._needed(gate.stream)):
                    raise RuntimeError(f"deadlock: {gate.stream} waits for what nobody will run")

    def _needed(self, stream: SimulatedStream) -> list[SimulatedStream]:
        """The runnable stream that `stream` is waiting for, directly or over others."""
        seen: set[SimulatedStream] = set()
        while stream not in seen:
            seen.add(stream)
            if stream.runnable:
                return [stream]
            if not stream.queue or stream.queue[0].gate is None:
                break
            stream = stream.queue[0].gate.stream
        return []

    def drain(self) -> None:
        """Run all that is queued, in the schedule's order. The test's own way to wait: not counted."""
        for stream in self.streams:
            self._run_until(Gate(stream, stream.submitted))

    def wait_for(self, stream: SimulatedStream) -> None:
        """Run until `stream` is empty. The test's own way to wait: not counted."""
        self._run_until(Gate(stream, stream.submitted))

    # --- the host waiting

    def host_sync(self, reason: str, gate: Gate | None = None) -> None:
        """The host waits for `gate`, by default for all of the current stream."""
        stream = self.current_stream
        if stream.recording is not None:
            raise CaptureError(f"{reason} needs the host to wait, in a capture")
        if self._syncs_forbidden:
            raise SynchronisedError(reason)
        self.host_syncs.append(reason)
        self._run_until(gate or Gate(stream, stream.submitted))

    @contextmanager
    def forbid_host_syncs(self) -> Iterator[None]:
        self._syncs_forbidden = True
        try:
            yield
        finally:
            self._syncs_forbidden = False

    # --- capture

    def begin_capture(self) -> Recording:
        stream = self.current_stream
        if stream is self.default_stream:
            raise CaptureError("the default stream cannot be captured")
        if stream.recording is not None:
            raise CaptureError("a capture is running on this stream already")
        if not self.prepared:
            raise CaptureError("the runtime is not prepared for a capture")
        self.trip("capture")
        self.captures_begun += 1
        stream.recording = Recording()
        return stream.recording

    def end_capture(self) -> None:
        self.current_stream.recording = None
        self.trip("capture_end")

    # --- faults

    def fail(self, point: str, times: int = 1) -> None:
        """Make the next `times` passes of `capture`, `capture_end`, `replay` or `allocate` fail."""
        self._faults[point] = times

    def trip(self, point: str) -> None:
        left = self._faults.get(point, 0)
        if left:
            self._faults[point] = left - 1
            raise SimulatedFault(f"{point} failed as the test asked")

    # --- memory

    @property
    def memory_allocated(self) -> int:
        self._collect()
        return self._live

    def allocate(self, nbytes: int) -> Lease:
        self.trip("allocate")
        nbytes = max(BLOCK, (nbytes + BLOCK - 1) // BLOCK * BLOCK)
        stream = self.current_stream
        home: object = stream if stream.recording is None else stream.recording.pool
        with self._lock:
            self._collect()
            block = self._reusable(nbytes, home)
            if block is None:
                block = Block(nbytes, home)
            elif stream.recording is None:
                self.submit("poison", block.poison, stream)
            self._live += nbytes
        lease = Lease(block)
        weakref.finalize(lease, self._freed.append, block).atexit = False
        return lease

    def _collect(self) -> None:
        # Blocks are freed by the garbage collector, at any moment; the lists change only here.
        while self._freed:
            block = self._freed.popleft()
            block.release = [Gate(user, user.submitted) for user in block.users]
            block.users.clear()
            self._live -= block.raw.numel()
            self._free.append(block)

    def _reusable(self, nbytes: int, home: object) -> Block | None:
        for index in range(len(self._free) - 1, -1, -1):
            block = self._free[index]
            if block.home is home and block.raw.numel() == nbytes and all(gate.reached for gate in block.release):
                return self._free.pop(index)
        return None

    # --- pinned memory

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor in pinned memory of this device."""
        layout = torch.empty_like(tensor, requires_grad=False)
        raw = torch.empty(max(1, layout.untyped_storage().nbytes()), dtype=torch.uint8)
        memory = raw.numpy().view(_PinnedArray)
        address = raw.data_ptr()
        self._pinned[address] = (raw.numel(), raw)
        weakref.finalize(memory, self._unpin, address).atexit = False
        pinned = torch.from_numpy(memory)[: layout.untyped_storage().nbytes()].view(tensor.dtype)
        return pinned.as_strided(layout.size(), layout.stride()).copy_(tensor.detach())

    def _unpin(self, address: int) -> None:
        # The bytes stay ours, so that a copy under way reads poison and not freed memory.
        with torch.inference_mode():
            self._pinned[address][1].fill_(POISON_BYTE)

    def pinned_alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The memory under a pinned tensor, as a tensor that does not keep it pinned; None for pageable memory."""
        address = tensor.data_ptr()
        for base, (size, raw) in self._pinned.items():
            if base <= address < base + size:
                offset = address - base
                typed = raw[offset : offset + (size - offset) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
                return typed.as_strided(tensor.size(), tensor.stride())
        return None
