# SPDX-License-Identifier: Apache-2.0
"""``hift.pt`` with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from omni_speech_accel.synthetic.random_weights import FloatArray, layer_weight, normal

# Hz. A voiced pitch, so that the sine source of the vocoder runs on real values instead of on silence.
_PITCH = 120.0


def _vocoder_weight(seed: int, name: str, shape: tuple[int, ...]) -> FloatArray:
    stream = f"vocoder.{name}"
    if name.endswith("f0_predictor.classifier.bias"):
        return np.full(shape, _PITCH, dtype=np.float32)
    if name.endswith("original0"):  # magnitude of a weight-normed kernel
        return np.full(shape, 0.7, dtype=np.float32)
    if name.endswith("alpha"):  # Snake frequency: positive
        frequency = normal(seed, stream, shape)
        np.abs(frequency, out=frequency)
        frequency += np.float32(0.5)
        return frequency
    return layer_weight(seed, stream, shape)


def write_vocoder(path: Path, seed: int) -> int:
    """Write the state dict of the host's HiFT generator; returns the number of weights."""
    import torch
    from vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav import _build_hift

    with torch.device("meta"):
        state = _build_hift().state_dict()
    weights = {name: torch.from_numpy(_vocoder_weight(seed, name, tuple(value.shape))) for name, value in state.items()}
    torch.save(weights, path)
    return sum(value.numel() for value in weights.values())
