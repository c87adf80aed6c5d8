# SPDX-License-Identifier: Apache-2.0
"""Ascend NPU behind the accelerator seam; needs `torch_npu`."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from typing import Any

import torch

from omni_speech_accel.environment import npu_capture_problem
from omni_speech_accel.runtime.accelerator import Device
from omni_speech_accel.runtime.device_module import DeviceModuleAccelerator
from omni_speech_accel.runtime.errors import RuntimeSetupError


class NpuAccelerator(DeviceModuleAccelerator):
    """Backend for `npu`.

    What becomes of a capture that fails, from torch_npu's sources (2.6 to 2.14). What the driver refuses at the begin
    or the end (`207008`, out of streams), and what an operator refuses before its launch ("Cannot run aclop operators
    during NPU graph capture"), is raised in the calling thread; it is undone, and the shape runs eager. But launches
    run in a thread of their own (`TASK_QUEUE_ENABLE=1`, the default), and one that fails there, as that of an operator
    which synchronises in a recording, stops that thread for good: torch_npu raises "The process exits for this inner
    error" and launches nothing more. No fallback survives that, so only functions whose operators are known to be
    recordable are captured here: CAM++ and the S3 tokenizer, which the reference thread replays on its NPU.

    Raises:
        ImportError: `torch_npu` is not installed.
    """

    device_type = "npu"

    def __init__(self) -> None:
        self._torch_npu = importlib.import_module("torch_npu")
        super().__init__(self._torch_npu.npu)  # also known as torch.npu
        self.supports_graphs = hasattr(self._module, "NPUGraph")

    def precision(self) -> Hashable:
        """With the HF32 switches, NPU's TF32."""
        flags = (getattr(self._module, name, None) for name in ("matmul", "conv"))
        return (super().precision(), *(getattr(flag, "allow_hf32", None) for flag in flags))

    def check_setup(self, device: Device) -> None:
        """Check for launches that no capture can record; see `npu_capture_problem`.

        Raises:
            RuntimeSetupError: `ASCEND_LAUNCH_BLOCKING=1` or `TASK_QUEUE_ENABLE=2` is set.
        """
        super().check_setup(device)
        if problem := npu_capture_problem():
            raise RuntimeSetupError(problem)

    def prepare_capture(self, device: Device) -> None:
        """Check the set-up, and set what the ACLNN kernels need in a capture.

        Internal formats and just-in-time compilation both make an operator's first launch do work outside the stream
        that the recording would miss.

        Raises:
            RuntimeSetupError: `check_setup` refuses.
        """
        self.check_setup(device)
        self._module.config.allow_internal_format = False
        self._module.set_compile_mode(jit_compile=False)

    def _new_graph(self) -> Any:
        return self._module.NPUGraph()

    def _forget_pool(self, device: torch.device, pool: Any) -> None:
        library = self._torch_npu._C
        # torch_npu 2.14 gave the call the name that CUDA's has.
        end = getattr(library, "_npu_endAllocateToPool", None) or getattr(
            library, "_npu_endAllocateCurrentStreamToPool", None
        )
        if end is None:
            return  # a release without these calls goes on filtering for an empty pool, no more
        try:
            end(device.index, pool)
        except RuntimeError:
            return  # as on CUDA
        library._npu_releasePool(device.index, pool)
