# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_speech_accel import runtime
from tests.simulator import DEVICE_TYPE, SimulatedAccelerator, SimulatedDevice, activate, slot_taken_by


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """A simulated device, the laziest there is, that the accelerator seam knows."""
    if slot_taken_by() is not None:
        pytest.skip(f"torch's one slot for an out-of-tree device is held by {slot_taken_by()!r} in this process")
    simulated = SimulatedDevice()
    runtime.register_backend(DEVICE_TYPE, lambda: SimulatedAccelerator(simulated))
    try:
        with activate(simulated):
            yield simulated
    finally:
        runtime.unregister_backend(DEVICE_TYPE)


@pytest.fixture
def accelerator(device: SimulatedDevice) -> runtime.Accelerator:
    return runtime.accelerator_for(DEVICE_TYPE)
