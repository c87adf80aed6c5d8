# SPDX-License-Identifier: Apache-2.0
"""The host as an accelerator: no streams, no graphs, every call is done when it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omni_speech_accel.runtime.accelerator import Accelerator, CapturedGraph, Device, Event, Stream
from omni_speech_accel.runtime.errors import RuntimeSetupError


class HostAccelerator(Accelerator):
    """Backend for `cpu`."""

    device_type = "cpu"
    supports_streams = False
    supports_graphs = False

    def resolve(self, device: Device) -> torch.device:
        # An index on "cpu" selects nothing; tensors on the host report none.
        return torch.device("cpu")

    def current_stream(self, device: Device) -> Stream:
        return None

    def create_stream(self, device: Device) -> Stream:
        return None

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        yield

    def create_event(self, device: Device) -> Event:
        return None

    def record_event(self, event: Event, stream: Stream) -> None:
        return None

    def wait_event(self, stream: Stream, event: Event) -> None:
        return None

    def event_done(self, event: Event) -> bool:
        return True

    def synchronize_event(self, event: Event) -> None:
        return None

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        return None

    def is_capturing(self, device: Device) -> bool:
        return False

    def prepare_capture(self, device: Device) -> None:
        raise RuntimeSetupError("cpu records no graphs")

    def _record_graph(self, fn: Callable[[], Any], device: torch.device) -> CapturedGraph:
        raise RuntimeSetupError("cpu records no graphs")

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def memory_allocated(self, device: Device) -> int:
        return 0  # torch keeps no count of host tensors

    def synchronize(self, device: Device) -> None:
        return None
