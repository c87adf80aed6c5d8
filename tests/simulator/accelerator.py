# SPDX-License-Identifier: Apache-2.0
"""The simulated device behind the accelerator seam."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from omni_speech_accel.runtime import Accelerator, RuntimeSetupError
from omni_speech_accel.runtime.accelerator import Device
from tests.simulator.device import RecordedGraph, SimulatedDevice, SimulatedEvent, SimulatedStream
from tests.simulator.tensor import DEVICE, DEVICE_TYPE


class SimulatedAccelerator(Accelerator):
    device_type = DEVICE_TYPE
    supports_streams = True
    supports_graphs = True

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device

    def resolve(self, device: Device) -> torch.device:
        return DEVICE

    def current_stream(self, device: Device) -> SimulatedStream:
        return self.device.current_stream

    def create_stream(self, device: Device) -> SimulatedStream:
        return self.device.create_stream()

    def use_stream(self, stream: SimulatedStream) -> AbstractContextManager[None]:
        return self.device.use_stream(stream)

    def create_event(self, device: Device) -> SimulatedEvent:
        return self.device.create_event()

    def record_event(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        self.device.record_event(event, stream)

    def wait_event(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        self.device.wait_event(stream, event)

    def event_done(self, event: SimulatedEvent) -> bool:
        return event.gate is None or event.gate.reached

    def synchronize_event(self, event: SimulatedEvent) -> None:
        self.device.host_sync("event", event.gate)

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]

    def is_capturing(self, device: Device) -> bool:
        return self.device.current_stream.recording is not None

    def prepare_capture(self, device: Device) -> None:
        if self.device.setup_error is not None:
            raise RuntimeSetupError(self.device.setup_error)
        self.device.prepared = True

    def _record_graph(self, fn: Callable[[], Any], device: torch.device) -> RecordedGraph:
        recording = self.device.begin_capture()
        try:
            outputs = fn()
        finally:
            self.device.end_capture()
        return RecordedGraph(self.device, recording, outputs)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.pin(tensor)

    def memory_allocated(self, device: Device) -> int:
        return self.device.memory_allocated

    def synchronize(self, device: Device) -> None:
        self.device.host_sync("device")
        self.device.drain()
