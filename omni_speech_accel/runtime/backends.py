# SPDX-License-Identifier: Apache-2.0
"""Which backend serves which kind of device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from omni_speech_accel.runtime.accelerator import Accelerator, Device

BackendFactory = Callable[[], Accelerator]


def _cuda() -> Accelerator:
    from omni_speech_accel.runtime.cuda import CudaAccelerator

    return CudaAccelerator()


def _npu() -> Accelerator:
    from omni_speech_accel.runtime.npu import NpuAccelerator

    return NpuAccelerator()


def _host() -> Accelerator:
    from omni_speech_accel.runtime.cpu import HostAccelerator

    return HostAccelerator()


_BUILT_IN: dict[str, BackendFactory] = {"cuda": _cuda, "npu": _npu, "cpu": _host}


_lock = threading.Lock()


_factories: dict[str, BackendFactory] = dict(_BUILT_IN)


_instances: dict[str, Accelerator] = {}


def _device_type(device: Device) -> str:
    # A string is split by hand: torch.device("npu") raises on a torch whose NPU plugin is not imported yet.
    return device.type if isinstance(device, torch.device) else device.split(":", 1)[0]


def register_backend(device_type: str, factory: BackendFactory) -> None:
    """Let `factory` answer for devices of `device_type`; it replaces an earlier backend of that type."""
    with _lock:
        _factories[device_type] = factory
        _instances.pop(device_type, None)


def unregister_backend(device_type: str) -> None:
    """Undo `register_backend`; a built-in backend of that type answers again. Unknown types are ignored."""
    with _lock:
        _instances.pop(device_type, None)
        _factories.pop(device_type, None)
        if device_type in _BUILT_IN:
            _factories[device_type] = _BUILT_IN[device_type]


def accelerator_for(device: Device) -> Accelerator:
    """The one `Accelerator` of this process for the type of `device`.

    Raises:
        ValueError: no backend answers for this device type.
    """
    device_type = _device_type(device)
    with _lock:
        found = _instances.get(device_type)
        if found is None:
            factory = _factories.get(device_type)
            if factory is None:
                known = ", ".join(sorted(_factories))
                raise ValueError(f"no accelerator backend for device type {device_type!r}; registered: {known}")
            found = _instances[device_type] = factory()
        return found
