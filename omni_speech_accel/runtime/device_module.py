# SPDX-License-Identifier: Apache-2.0
"""What CUDA and NPU share: `torch.cuda` and `torch.npu` have the same streams, events and graph calls."""

from __future__ import annotations

import gc
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from omni_speech_accel.runtime.accelerator import Accelerator, CapturedGraph, Device, Event, Stream

logger = logging.getLogger(__name__)


class _CollectorRest:
    """Python's collector rests while any thread of the process records; on again after the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recordings = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._recordings:
                self._was_on = gc.isenabled()
                gc.disable()
            self._recordings += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._recordings -= 1
            if not self._recordings and self._was_on:
                gc.enable()


_collector_resting = _CollectorRest()


@dataclass(frozen=True)
class _DeviceGraph:
    graph: Any
    outputs: Any

    def replay(self) -> None:
        self.graph.replay()


class DeviceModuleAccelerator(Accelerator):
    """An accelerator behind a torch device module (`torch.cuda`, `torch.npu`)."""

    supports_streams = True

    def __init__(self, module: Any) -> None:
        self._module = module
        self._refused: list[Any] = []  # few: a graph cache stops capturing after failures in a row

    def resolve(self, device: Device) -> torch.device:
        device = torch.device(device)
        if device.index is not None:
            return device
        return torch.device(device.type, self._module.current_device())

    def current_stream(self, device: Device) -> Stream:
        return self._module.current_stream(device)

    def create_stream(self, device: Device) -> Stream:
        return self._module.Stream(device=device)

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._module.stream(stream)
        return context

    def create_event(self, device: Device) -> Event:
        return self._module.Event()

    def record_event(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def event_done(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize_event(self, event: Event) -> None:
        event.synchronize()

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def is_capturing(self, device: Device) -> bool:
        # The library asks for the current device's stream only.
        with self._module.device(self.resolve(device)):
            return bool(self._module.is_current_stream_capturing())

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not Tensor.pin_memory(): that returns a tensor that is pinned already as it is, and the caller's own memory
        # is what must not be read after the return.
        pinned = torch.empty_like(tensor, requires_grad=False, pin_memory=True)
        return pinned.copy_(tensor.detach())

    def memory_allocated(self, device: Device) -> int:
        return int(self._module.memory_allocated(device))

    def memory_free(self, device: Device) -> int | None:
        free, _ = self._module.mem_get_info(device)
        unused = self._module.memory_reserved(device) - self._module.memory_allocated(device)
        return int(free) + int(unused)

    def synchronize(self, device: Device) -> None:
        self._module.synchronize(device)

    def _record_graph(self, fn: Callable[[], Any], device: torch.device) -> CapturedGraph:
        """Drive the graph object by hand.

        The library's `graph(...)` context synchronises the device, collects garbage and empties the allocator's cache
        on entry: every other stream of the process would stall for a capture that concerns one of them. What the
        collection is for, no graph being destroyed while another is recorded, is had by pausing the collector.
        """
        graph = self._new_graph()
        pool = self._module.graph_pool_handle()
        with _collector_resting:
            try:
                self._begin(graph, pool)
            except BaseException:
                self._undo_begin(graph, device, pool)
                raise
            try:
                outputs = fn()
            except BaseException:
                self._undo_recording(graph, device, pool)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._abandon(device, pool)
                raise
        return _DeviceGraph(graph, outputs)

    def _begin(self, graph: Any, pool: Any) -> None:
        # "thread_local": an allocation by another thread meanwhile is no error of this capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def _undo_begin(self, graph: Any, device: torch.device, pool: Any) -> None:
        """Take back a capture that was refused at its begin: on Ascend that is where it is seen to be out of streams.

        The driver is asked last, when the allocators filter for the pool and the generator is in its capture state.
        """
        # A filter asks the graph object which capture it is: the pinned allocator's, which nothing takes out from
        # Python, must not find freed memory there.
        self._refused.append(graph)
        if self.is_capturing(device):  # refused after the driver had agreed
            self._undo_recording(graph, device, pool)
        else:
            self._abandon(device, pool)

    def _undo_recording(self, graph: Any, device: torch.device, pool: Any) -> None:
        try:
            graph.capture_end()
        except Exception:  # the reason is the exception that the caller raises
            self._abandon(device, pool)

    def _abandon(self, device: torch.device, pool: Any) -> None:
        """Take back what `capture_begin` told the library, which `capture_end` does only where the driver agrees.

        Without it the allocator goes on believing that a capture is running, and never again reuses a block that a
        second stream was recorded on: a leak with every request. And the random number generator goes on believing
        it too (until torch 2.12 every capture enters its state): the next noise drawn, for a CFM solve, fails with
        "Offset increment outside graph capture". Only a capture that succeeds resets the generator, hence the
        smallest one; where the driver refuses that too, the generator gets a copy of its state, which is in none.
        """
        self._forget_pool(device, pool)
        graph = self._new_graph()
        pool = self._module.graph_pool_handle()
        try:
            self._begin(graph, pool)
            torch.zeros((), device=device)
            graph.capture_end()
        except Exception:
            self._refused.append(graph)
            if self.is_capturing(device):
                with suppress(Exception):
                    graph.capture_end()
            self._forget_pool(device, pool)
            try:
                generator = self._module.default_generators[device.index]
                generator.graphsafe_set_state(generator.clone_state())
            except Exception:
                logger.exception("a failed graph capture could not be undone on %s", device)

    @abstractmethod
    def _new_graph(self) -> Any:
        """An empty graph object of the library."""

    @abstractmethod
    def _forget_pool(self, device: torch.device, pool: Any) -> None:
        """Tell the allocator that the capture into `pool` is over, if it has not been told."""
