# SPDX-License-Identifier: Apache-2.0
"""``campplus.onnx`` with random weights."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from omni_speech_accel.campplus.onnx_weights import EMBEDDING_SIZE, FEATURE_BINS
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank
from omni_speech_accel.synthetic.random_weights import FloatArray, layer_weight, normal, uniform

# Power of a mean-normalised log-mel fbank of speech: standard deviation 3 to 4.8 on the references that ship with the
# host.
_FBANK_POWER = 15.0

# Power that a BatchNorm of each block finds at its input on speech. A trained model has learned it; without it the
# masks saturate at 0 or 1 and most of the network has no effect on the embedding, so that no fault in it shows.
# With it the masks' logits have a standard deviation of 0.6 to 2 on speech.
_BLOCK_POWER = (12.0, 0.5, 0.5)


def _running_var(name: str, draw: FloatArray) -> FloatArray:
    """Around the power expected at that place; ``draw`` is uniform in 0..1."""
    scale = 1.0
    if name == "head.bn1.running_var":
        scale = _FBANK_POWER
    for number, power in enumerate(_BLOCK_POWER, start=1):
        if name.startswith((f"xvector.block{number}.", f"xvector.transit{number}.")) and "nonlinear2" not in name:
            scale = power
    draw += np.float32(0.5)
    draw *= np.float32(scale)
    return draw


def _speaker_weight(seed: int, name: str, shape: tuple[int, ...]) -> FloatArray:
    stream = f"speaker.{name}"
    if name.endswith("running_var"):
        return _running_var(name, uniform(seed, stream, shape))
    if name.endswith("running_mean"):
        return normal(seed, stream, shape, 0.1)
    # gain 1.4 makes up for what a ReLU halves
    return layer_weight(seed, stream, shape, 1.0 if ".cam_layer.linear" in name and "local" not in name else 1.4)


def _centre(network: Any, seed: int) -> None:
    """Set the last BatchNorm to the mean embedding of synthetic speech at several levels, as training does.

    A random network maps every voice to nearly one direction (cosine 0.97 to 0.99 between speakers), so that mixing two
    references up would hardly show. Rounded to 1/16: the same bits whatever the machine's convolution order.
    """
    import torch

    levels = np.linspace(0.9, 1.7, 8, dtype=np.float32)
    batch = np.stack([level * speech_like_fbank(300, 100 * seed + index) for index, level in enumerate(levels)])
    with torch.no_grad():
        norm = network.xvector.dense.nonlinear.batchnorm
        norm.running_mean.zero_()
        norm.running_var.fill_(1.0)
        mean = network(torch.from_numpy(batch)).mean(dim=0)
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
