# SPDX-License-Identifier: Apache-2.0
"""Host tensors to the device without waiting for it.

A plain `tensor.to(device)` from pageable memory makes the host wait until all work queued on the stream is done: with
100 ms queued, each upload of a reference costs those 100 ms. From pinned memory the copy is queued like any other
work, and then the pinned memory must outlive it. Ownership is kept here, by an event per copy, and not left to the
pinned allocator: drivers exist whose allocator hands the memory out again before the copy has read it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import torch

from omni_speech_accel.environment import BLOCKING_COPY, blocking_copy_requested
from omni_speech_accel.runtime.accelerator import Accelerator, Device, Event
from omni_speech_accel.runtime.backends import accelerator_for

logger = logging.getLogger(__name__)


class PinnedStager:
    """Uploads through pinned memory that stays owned until the device has read it. Thread-safe.

    Args:
        accelerator: the device's backend.
        blocking: True uploads with the host waiting; None asks the environment (`OMNI_SPEECH_ACCEL_BLOCKING_COPY`).
    """

    def __init__(self, accelerator: Accelerator, blocking: bool | None = None) -> None:
        self._accelerator = accelerator
        self._blocking = blocking_copy_requested() if blocking is None else blocking
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[Event, torch.Tensor]] = deque()

    @property
    def in_flight(self) -> int:
        """Pinned sources owned now; finished ones are let go at the next upload."""
        return len(self._in_flight)

    def upload(self, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        """`tensor` on `device`: the values, dtype, shape and strides of `tensor.to(device)`.

        A tensor that is there already is returned as it is. The host does not wait, and `tensor` may be rewritten or
        freed as soon as this returns. The copy is queued on the current stream.
        """
        accelerator = self._accelerator
        device = accelerator.resolve(device)
        if tensor.device == device:
            return tensor
        # Inside a capture the copy would be recorded and read this call's buffer again at each replay.
        if (
            self._blocking
            or not accelerator.supports_streams
            or tensor.device.type != "cpu"
            or accelerator.is_capturing(device)
        ):
            return tensor.to(device)
        try:
            pinned = accelerator.pin_memory(tensor)
        except (RuntimeError, MemoryError) as error:
            self._pin_no_more(error)
            return tensor.to(device)
        uploaded = torch.empty_like(pinned, device=device, pin_memory=False)
        uploaded.copy_(pinned, non_blocking=True)
        event = accelerator.create_event(device)
        accelerator.record_event(event, accelerator.current_stream(device))
        with self._lock:
            self._in_flight.append((event, pinned))
        self.reclaim()
        return uploaded

    def _pin_no_more(self, error: Exception) -> None:
        """Memory cannot be pinned everywhere (WSL, some containers), nor without end; stock's transfer always works."""
        with self._lock:
            known, self._blocking = self._blocking, True
        if not known:
            logger.warning(
                "no memory can be pinned here, uploads wait from now on as with %s=1: %s: %s",
                BLOCKING_COPY,
                type(error).__name__,
                error,
            )

    def reclaim(self) -> int:
        """Let go of the sources whose copies are done; returns how many. Never waits."""
        with self._lock:
            owned = len(self._in_flight)
            # Copies on different streams finish in any order, so each is asked.
            self._in_flight = deque(copy for copy in self._in_flight if not self._accelerator.event_done(copy[0]))
            return owned - len(self._in_flight)


_stagers_lock = threading.Lock()
_stagers: dict[Accelerator, PinnedStager] = {}


def upload(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """`PinnedStager.upload` by the process's stager for this kind of device."""
    accelerator = accelerator_for(device)
    with _stagers_lock:
        stager = _stagers.get(accelerator)
        if stager is None:
            stager = _stagers[accelerator] = PinnedStager(accelerator)
    return stager.upload(tensor, device)
