# SPDX-License-Identifier: Apache-2.0
"""``campplus.onnx`` with random weights."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from omni_speech_accel.checkpoint.random_weights import FloatArray, layer_weight, normal
from omni_speech_accel.models.campplus_onnx import EMBEDDING_SIZE, FEATURE_BINS
from omni_speech_accel.models.campplus_parity import speech_like_fbank

# Power of a mean-normalised log-mel fbank of speech: standard deviation 3 to 4.8 on the references that ship with the
# host. Without it in the first BatchNorm the masks of all layers saturate at 0 or 1 and hide most of the network.
_FBANK_POWER = 15.0


def _speaker_weight(seed: int, name: str, shape: tuple[int, ...]) -> FloatArray:
    stream = f"speaker.{name}"
    if name.endswith("running_var"):
        var = 0.5 + np.random.default_rng([seed, len(name), *name.encode()]).random(shape, dtype=np.float32)
        if name == "head.bn1.running_var":
            return var * np.float32(_FBANK_POWER)
        if "nonlinear1" in name or name.startswith("xvector.transit"):
            return var * np.float32(10.0)
        return var
    if name.endswith("running_mean"):
        return np.float32(0.1) * normal(seed, stream, shape)
    if len(shape) >= 2:
        gain = 0.7 if ".cam_layer.linear2" in name or ".cam_layer.linear1" in name else 1.4
        return layer_weight(seed, stream, shape, gain)
    return layer_weight(seed, stream, shape)


def _centre(network: Any, seed: int) -> None:
    """Set the last BatchNorm to the mean embedding of synthetic speech, as training does.

    A random network maps every voice to nearly one direction (cosine 0.97 to 0.99 between speakers), so that mixing two
    references up would hardly show. Rounded to 1/16: the same bits whatever the machine's convolution order.
    """
    import torch

    with torch.no_grad():
        batch = torch.from_numpy(np.stack([speech_like_fbank(300, 100 * seed + index) for index in range(8)]))
        norm = network.xvector.dense.nonlinear.batchnorm
        norm.running_mean.zero_()
        norm.running_var.fill_(1.0)
        mean = network(batch).mean(dim=0)
        norm.running_mean.copy_((mean * 16).round() / 16)


def build_speaker(seed: int) -> Any:
    """The host's own ``CAMPPlus`` (80 bins in, 192 out) with random weights, in eval mode, float32."""
    import torch
    from vllm_omni.model_executor.models.indextts2.utils.campplus.dtdnn import CAMPPlus

    network = CAMPPlus(feat_dim=FEATURE_BINS, embedding_size=EMBEDDING_SIZE).float().eval()
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.from_numpy(_speaker_weight(seed, name, tuple(value.shape))))
    _centre(network, seed)
    return network


def write_speaker(path: Path, seed: int) -> int:
    """Export the random CAM++ as 3D-Speaker exported the shipped one; returns the number of weights.

    The TorchScript exporter with constant folding, because that is what shaped the file that hosts ship: convolution
    and BatchNorm pairs folded into anonymous tensors, equal tensors written once.
    """
    import torch

    network = build_speaker(seed)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network,
                (torch.zeros(1, 200, FEATURE_BINS, dtype=torch.float32),),
                str(path),
                dynamo=False,
                opset_version=13,
                do_constant_folding=True,
                input_names=["input"],
                output_names=["output"],
                dynamic_axes={"input": {0: "B", 1: "T"}, "output": {0: "B"}},
            )
    finally:
        logger.setLevel(level)
    return sum(value.numel() for value in network.state_dict().values())
