# SPDX-License-Identifier: Apache-2.0
"""Ascend NPU behind the accelerator seam; needs `torch_npu`."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from omni_speech_accel.runtime.accelerator import Device
from omni_speech_accel.runtime.device_module import DeviceModuleAccelerator
from omni_speech_accel.runtime.errors import RuntimeSetupError

# CANN's switch that makes every launch wait for its kernel.
LAUNCH_BLOCKING = "ASCEND_LAUNCH_BLOCKING"


class NpuAccelerator(DeviceModuleAccelerator):
    """Backend for `npu`.

    Raises:
        ImportError: `torch_npu` is not installed.
    """

    device_type = "npu"

    def __init__(self) -> None:
        self._torch_npu = importlib.import_module("torch_npu")
        super().__init__(self._torch_npu.npu)  # also known as torch.npu
        self.supports_graphs = hasattr(self._module, "NPUGraph")

    def prepare_capture(self, device: Device) -> None:
        """Check for blocking launches, and set what the ACLNN kernels need in a capture.

        A launch that waits for its kernel cannot be recorded. Internal formats and just-in-time compilation both make
        an operator's first launch do work outside the stream that the recording would miss.

        Raises:
            RuntimeSetupError: `ASCEND_LAUNCH_BLOCKING=1` is set.
        """
        if os.environ.get(LAUNCH_BLOCKING, "").strip() == "1":
            raise RuntimeSetupError(
                f"{LAUNCH_BLOCKING}=1 makes every launch wait, which no graph capture can record; "
                f"unset {LAUNCH_BLOCKING} or turn the graph items off"
            )
        self._module.config.allow_internal_format = False
        self._module.set_compile_mode(jit_compile=False)

    def _new_graph(self) -> Any:
        return self._module.NPUGraph()

    def _forget_pool(self, device: torch.device, pool: Any) -> None:
        library = self._torch_npu._C
        try:
            library._npu_endAllocateCurrentStreamToPool(device.index, pool)
        except (AttributeError, RuntimeError):
            return  # as on CUDA; a release without these calls leaves an empty pool behind, no more
        library._npu_releasePool(device.index, pool)
