# SPDX-License-Identifier: Apache-2.0
"""The accelerator seam: what the rest of the package may ask of a device, and which backend answers.

Everything outside `omni_speech_accel.runtime` speaks to a device through `Accelerator` alone, so that the same code
runs on CUDA, on NPU, on the host, and on the simulated accelerator of the test-suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from omni_speech_accel.environment import blocking_copy_problem
from omni_speech_accel.runtime.errors import RuntimeSetupError

Device: TypeAlias = torch.device | str

# A stream and an event belong to their backend; the callers only hand them back.
Stream: TypeAlias = Any
Event: TypeAlias = Any


class CapturedGraph(Protocol):
    """A recorded graph.

    `outputs` is the pytree that the captured function returned. Its tensors live in the graph's private pool and hold
    nothing meaningful until the first `replay`, because a capture records operations and does not run them; every
    later replay overwrites them.
    """

    @property
    def outputs(self) -> Any: ...

    def replay(self) -> None:
        """Queue the recorded work on the current stream."""


class Accelerator(ABC):
    """One kind of device. Instances are stateless towards their callers and safe to share between threads."""

    device_type: str
    supports_streams: bool
    supports_graphs: bool

    @abstractmethod
    def resolve(self, device: Device) -> torch.device:
        """`device` with its index filled in (the current device where it has none)."""

    @abstractmethod
    def current_stream(self, device: Device) -> Stream:
        """The stream on which this thread's work for `device` is queued now."""

    @abstractmethod
    def create_stream(self, device: Device) -> Stream:
        """A new stream that is ordered with no other stream."""

    @abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Context in which this thread's work goes to `stream`."""

    @abstractmethod
    def create_event(self, device: Device) -> Event:
        """A new event, not recorded; waiting on it before a record is no wait."""

    @abstractmethod
    def record_event(self, event: Event, stream: Stream) -> None:
        """Mark the end of the work queued on `stream` so far."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make later work on `stream` wait for `event` on the device; the host does not wait."""

    @abstractmethod
    def event_done(self, event: Event) -> bool:
        """Whether the work before the event's last record has finished; never waits."""

    @abstractmethod
    def synchronize_event(self, event: Event) -> None:
        """Block the host until the event's last record has been reached."""

    @abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory from reuse, once it is freed, until the work now queued on `stream` is done."""

    @abstractmethod
    def is_capturing(self, device: Device) -> bool:
        """Whether the current stream of this thread is recording a graph."""

    def precision(self) -> Hashable:
        """The process's switches that choose among kernels of different precision; a graph bakes in the choice.

        `torch.set_float32_matmul_precision` and the `allow_tf32` flags set these too; reading those instead raises
        where somebody has used both kinds.
        """
        backends: Any = torch.backends
        return (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)

    def check_setup(self, device: Device) -> None:
        """Check what the package and a right capture need of the process's environment; sets and captures nothing.

        For start-up: a server whose graphs cannot be right must not start.

        Raises:
            RuntimeSetupError: a variable's value is none that it takes, or rules captures out; it is named.
        """
        if problem := blocking_copy_problem():
            raise RuntimeSetupError(problem)

    @abstractmethod
    def prepare_capture(self, device: Device) -> None:
        """Check (`check_setup`) and set what a right capture needs.

        Raises:
            RuntimeSetupError: the environment makes a right capture impossible; the message names the variable.
        """

    def capture(
        self,
        fn: Callable[[], Any],
        device: Device,
        *,
        stream: Stream | None = None,
        warmups: int = 2,
    ) -> CapturedGraph:
        """Run `fn` eagerly `warmups` times, then record it into a graph with a private memory pool.

        The warm-ups run on the caller's stream, so that lazy initialisation and library plans, which may allocate or
        synchronise, are over before the recording, and are ordered with what the caller does next. The recording
        happens on `stream` (a new one where none is given), on which nothing else should run: a matrix library keeps a
        workspace per stream, which the graph uses wherever it is replayed. Neither the device nor the host is
        synchronised, so other streams do not stall.

        Raises:
            RuntimeSetupError: this backend has no graphs.
            Exception: whatever the warm-up, the recording or the driver raised; the stream is then usable again.
        """
        if not self.supports_graphs:
            raise RuntimeSetupError(f"{self.device_type} records no graphs")
        device = self.resolve(device)
        for _ in range(warmups):
            fn()
        caller = self.current_stream(device)
        side = self.create_stream(device) if stream is None else stream
        # A recording runs nothing that would have to wait. But the library may queue some work of its own beside it
        # (the generator's seed), and a sanitizer takes a recorded access for one that happened.
        self._order(device, first=caller, then=side)
        try:
            with self.use_stream(side):
                return self._record_graph(fn, device)
        finally:
            self._order(device, first=side, then=caller)

    def _order(self, device: torch.device, *, first: Stream, then: Stream) -> None:
        event = self.create_event(device)
        self.record_event(event, first)
        self.wait_event(then, event)

    @abstractmethod
    def _record_graph(self, fn: Callable[[], Any], device: torch.device) -> CapturedGraph:
        """Record `fn` on the current stream, which is not the default one, into a graph with its own pool."""

    @abstractmethod
    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fresh copy of a host tensor, in memory that the device can read by itself (the host: ordinary memory)."""

    @abstractmethod
    def memory_allocated(self, device: Device) -> int:
        """Bytes that tensors occupy on `device` now."""

    def memory_free(self, device: Device) -> int | None:
        """Bytes that new tensors could take on `device` now, or None where this backend cannot tell.

        Free driver memory plus what the allocator holds unused. An upper bound: unused parts of a graph's private
        pool are counted too and serve no other tensor.
        """
        return None

    @abstractmethod
    def synchronize(self, device: Device) -> None:
        """Block the host until `device` is idle. For tests and benchmarks only."""
