# SPDX-License-Identifier: Apache-2.0
"""CPU workers that run the *stock* vllm-omni model runners; a deploy YAML names them as ``worker_cls``.

The host has runners for CUDA, NPU and XPU and none for CPU, whose platform it leaves unspecified. Its CUDA runners use
nothing of CUDA that vLLM's CPU runner does not already neutralise, so the two combine by inheritance.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

SEED_VARIABLE = "OMNI_SPEECH_TEST_HOST_SEED"
ROW_NOISE_VARIABLE = "OMNI_SPEECH_TEST_HOST_ROW_NOISE"


def _row_noise() -> AbstractContextManager[Any]:
    """Draws that do not depend on a row's place in its batch: which rows share one is the clock's affair."""
    # Here, not above: most servers of this host run without that package.
    from omni_speech_accel.measure.noise import RowIndependentNoise

    return RowIndependentNoise()


class CPUGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):
    """The stock generation runner, with the CPU one between it and the runner that both derive from."""

    def _run_generation_model(self, **inputs: Any) -> Any:
        # The vocoder draws fresh noise in every call; from one seed, equal requests give equal bytes.
        if (seed := os.environ.get(SEED_VARIABLE)) is not None:
            torch.manual_seed(int(seed))
        with _row_noise() if os.environ.get(ROW_NOISE_VARIABLE) else nullcontext():
            return super()._run_generation_model(**inputs)


class CPUARModelRunner(GPUARModelRunner, CPUModelRunner):
    """The stock autoregressive runner on a CPU."""


class CPUGenerationWorker(OmniWorkerMixin, CPUWorker):
    """Worker of a stage that turns codec tokens into audio."""

    model_runner_cls: ClassVar[type[CPUModelRunner]] = CPUGenerationModelRunner

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)


class CPUARWorker(CPUGenerationWorker):
    """Worker of the talker stage."""

    model_runner_cls = CPUARModelRunner
