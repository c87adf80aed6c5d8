# SPDX-License-Identifier: Apache-2.0
"""CUDA behind the accelerator seam."""

from __future__ import annotations

from typing import Any

import torch

from omni_speech_accel.runtime.accelerator import Device
from omni_speech_accel.runtime.device_module import DeviceModuleAccelerator


class CudaAccelerator(DeviceModuleAccelerator):
    """Backend for `cuda`."""

    device_type = "cuda"
    supports_graphs = True

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    def prepare_capture(self, device: Device) -> None:
        """Nothing to check.

        `CUDA_LAUNCH_BLOCKING=1` is no obstacle, unlike its counterpart on NPU: a launch into a capturing stream is
        recorded, not waited for, so graphs are right under it; only replays block the host, as the operator asked.
        """

    def _new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def _forget_pool(self, device: torch.device, pool: Any) -> None:
        try:
            torch._C._cuda_endAllocateToPool(device.index, pool)
        except (AttributeError, RuntimeError):
            # The failure came after this step. Then the graph may release the pool itself when it is destroyed, and
            # a second release would abort the process from its destructor.
            return
        torch._C._cuda_releasePool(device.index, pool)
