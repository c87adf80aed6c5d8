# SPDX-License-Identifier: Apache-2.0
"""CAM++ for inference: 80-bin fbank in, 192-dimensional speaker embedding out.

The network of "CAM++: A Fast and Efficient Network for Speaker Verification Using Context-Aware Masking"
(Wang et al., 2023): a residual 2-D convolution head (FCM), three densely connected TDNN blocks whose every layer is
gated by a context-aware mask (CAM), statistics pooling, one linear layer. Laid out for few kernel launches:

* A dense block is one buffer ``[B, 1 + C, 1, T]`` that each layer writes its 32 channels into, instead of 52
  concatenations of a growing tensor.
* Row 0 of that buffer is the constant one, so every pointwise convolution carries its bias as a column of its weight.
* ``relu(s * x + b)`` in front of a linear map equals that map, rescaled, of ``x`` clamped at ``-b / s``: the BatchNorm
  and the activation of a dense layer are one clamp.
* The mask is computed once per 100-frame segment, not once per frame: all frames of a segment share it.

Everything is float32 whatever torch's default dtype or the autocast state; on CUDA the convolutions ask for full
precision per call, because TF32 costs 1.1e-3 of relative error in the embedding and its switch is a process-wide flag
that other threads move.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_speech_accel.models.campplus_onnx import (
    BLOCK_DILATIONS,
    BLOCK_LAYERS,
    BOTTLENECK,
    CAM_HIDDEN,
    FEATURE_BINS,
    GROWTH,
    HEAD_CHANNELS,
    Array,
    CampplusWeights,
)

# 3D-Speaker CAMLayer.seg_pooling: frames per context segment, after the stride-2 TDNN.
SEGMENT_FRAMES = 100

_FLOAT_MAX = float(np.finfo(np.float32).max)


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """2-D convolution in full float32; ``bias`` is ``[C, 1, 1]``."""
    if x.is_cuda and torch.version.cuda is not None:
        # The flag-free entry point: allow_tf32 is an argument of this call, so no process-wide switch is read or set.
        out: Tensor = torch.ops.aten.cudnn_convolution(
            x, weight, padding, stride, dilation, groups=1, benchmark=False, deterministic=True, allow_tf32=False
        )
        return out if bias is None else out.add_(bias)
    return F.conv2d(x, weight, None if bias is None else bias.flatten(), stride, padding, dilation)


def _few_columns(weight: Tensor, x: Tensor) -> Tensor:
    """The pointwise convolution ``weight`` ``[O, C, 1, 1]`` of ``x`` ``[B, C, 1, S]`` with a handful of columns ``S``.

    Product and sum: at one column per 100 frames a convolution kernel takes 10 us for what these two do in 5 (H200),
    104 times per embedding. A matrix product would follow the process-wide TF32 switch.
    """
    return (weight * x.unsqueeze(1)).sum(2)


def _float32(value: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))


class _HeadConv(nn.Module):
    """2-D convolution with its BatchNorm folded in."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: tuple[Array, Array | None], stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        weight, bias = weights
        assert bias is not None
        self.register_buffer("weight", _float32(weight))
        self.register_buffer("bias", _float32(bias.reshape(-1, 1, 1)))
        self.stride = stride
        pad = (weight.shape[-1] - 1) // 2
        self.padding = (pad, pad)

    def forward(self, x: Tensor) -> Tensor:
        return _conv(x, self.weight, self.bias, self.stride, self.padding)


class _HeadBlock(nn.Module):
    """Residual pair of convolutions; a strided block projects its input with a 1x1 convolution."""

    def __init__(self, weights: CampplusWeights, path: str, stride: tuple[int, int]) -> None:
        super().__init__()
        self.conv1 = _HeadConv(weights.conv[f"{path}.conv1"], stride)
        self.shortcut: _HeadConv | None = None
        if f"{path}.shortcut.0" in weights.conv:
            self.shortcut = _HeadConv(weights.conv[f"{path}.shortcut.0"], stride)
        self.conv2 = _HeadConv(weights.conv[f"{path}.conv2"])

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.conv1(x).relu_())
        return out.add_(x if self.shortcut is None else self.shortcut(x)).relu_()


def _clamp_form(affine: tuple[Array, Array], weight: Array, bias: Array | None) -> tuple[Array, Array, Array]:
    """Rewrite ``weight @ relu(scale * x + shift) + bias`` as ``column @ clamp([1; x], low, high)``.

    Returns ``low`` and ``high`` of shape ``[1 + C]`` and the matrix ``[outputs, 1 + C]`` with the bias as column 0.
    """
    scale, shift = affine
    flat = scale == 0
    threshold = np.where(flat, 0.0, -shift / np.where(flat, 1.0, scale))
    low = np.where(scale > 0, threshold, -np.inf)
    high = np.where(scale < 0, threshold, np.inf)
    low, high = np.where(flat, 0.0, low), np.where(flat, 0.0, high)
    constant = np.where(flat, np.maximum(shift, 0.0), shift)
    column = weight @ constant + (0.0 if bias is None else bias)
    matrix = np.concatenate([column[:, None], weight * scale], axis=1)
    low, high = (
        np.clip(np.concatenate([[end], x]), -_FLOAT_MAX, _FLOAT_MAX) for end, x in ((-np.inf, low), (np.inf, high))
    )
    return low, high, matrix


class _ClampedPointwise(nn.Module):
    """BatchNorm, ReLU and a pointwise convolution on a buffer ``[B, 1 + C, 1, T]`` whose row 0 is one."""

    low: Tensor
    high: Tensor
    weight: Tensor

    def __init__(self, affine: tuple[Array, Array], conv: tuple[Array, Array | None], *, carry_one: bool) -> None:
        super().__init__()
        weight, bias = conv
        low, high, matrix = _clamp_form(affine, weight[:, :, 0], bias)
        if carry_one:
            one = np.zeros((1, matrix.shape[1]))
            one[0, 0] = 1.0
            matrix = np.concatenate([one, matrix])
        self.register_buffer("low", _float32(low.reshape(-1, 1, 1)))
        self.register_buffer("high", _float32(high.reshape(-1, 1, 1)))
        self.register_buffer("weight", _float32(matrix[:, :, None, None]))

    def forward(self, x: Tensor) -> Tensor:
        return _conv(torch.clamp(x, self.low, self.high), self.weight)


class _DenseLayer(nn.Module):
    """One D-TDNN layer: bottleneck, local convolution, and the context-aware mask on its 32 outputs."""

    local: Tensor
    mask1: Tensor
    mask2: Tensor

    def __init__(self, weights: CampplusWeights, path: str, dilation: int) -> None:
        super().__init__()
        self.bottleneck = _ClampedPointwise(
            weights.affine[f"{path}.nonlinear1.batchnorm"], weights.conv[f"{path}.linear1"], carry_one=True
        )
        self.dilation = dilation
        local, _ = weights.conv[f"{path}.cam_layer.linear_local"]
        # the bottleneck's row 0 is the carried one, which the local convolution must not see
        self.register_buffer("local", _float32(np.pad(local, ((0, 0), (1, 0), (0, 0)))[:, :, None, :]))
        weight1, bias1 = weights.conv[f"{path}.cam_layer.linear1"]
        weight2, bias2 = weights.conv[f"{path}.cam_layer.linear2"]
        assert bias1 is not None
        assert bias2 is not None
        # The context is a mean plus a segment mean, so the carried one arrives as two: halve what multiplies it.
        mask1 = np.zeros((1 + CAM_HIDDEN, 1 + BOTTLENECK))
        mask1[0, 0] = 0.5
        mask1[1:, 0] = bias1 / 2
        mask1[1:, 1:] = weight1[:, :, 0]
        self.register_buffer("mask1", _float32(mask1[:, :, None, None]))
        mask2 = np.concatenate([bias2[:, None], weight2[:, :, 0]], axis=1)
        self.register_buffer("mask2", _float32(mask2[:, :, None, None]))

    def forward(self, x: Tensor, out: Tensor, segments: Tensor | None) -> None:
        """``x`` ``[B, 1 + C, 1, T]``; writes ``[B, 32, 1, T]`` into ``out``. ``segments`` maps frames to segments."""
        hidden = self.bottleneck(x).relu_()
        context = F.avg_pool2d(hidden, (1, SEGMENT_FRAMES), (1, SEGMENT_FRAMES), ceil_mode=True)
        context = context.add_(hidden.mean(-1, keepdim=True))
        mask = _few_columns(self.mask2, _few_columns(self.mask1, context).relu_()).sigmoid_()
        if segments is not None:
            mask = mask.index_select(-1, segments)
        local = _conv(hidden, self.local, None, (1, 1), (0, self.dilation), (1, self.dilation))
        torch.mul(local, mask, out=out)


class CampplusNet(nn.Module):
    """CAM++ in eval mode, built from :func:`read_campplus_weights`. Holds buffers only: nothing to train.

    ``forward`` makes no host synchronisation, no tensor on another device and no branch on data, so it can be captured
    in an accelerator graph. It computes exactly the frames it is given: padding changes an embedding.
    """

    head: nn.Module
    tdnn_weight: Tensor
    tdnn_bias: Tensor
    dense_weight: Tensor
    dense_bias: Tensor

    def __init__(self, weights: CampplusWeights) -> None:
        super().__init__()
        conv = weights.conv
        self.conv1 = _HeadConv(conv["head.conv1"])
        self.head_blocks = nn.ModuleList(
            _HeadBlock(weights, f"head.layer{layer}.{index}", (2, 1) if index == 0 else (1, 1))
            for layer in (1, 2)
            for index in (0, 1)
        )
        self.conv2 = _HeadConv(conv["head.conv2"], (2, 1))
        tdnn_weight, tdnn_bias = conv["xvector.tdnn.linear"]
        dense_weight, dense_bias = conv["xvector.dense.linear"]
        assert tdnn_bias is not None
        assert dense_bias is not None
        self.register_buffer("tdnn_weight", _float32(tdnn_weight[:, :, None, :]))
        self.register_buffer("tdnn_bias", _float32(tdnn_bias.reshape(-1, 1, 1)))
        self.blocks = nn.ModuleList()
        self.transits = nn.ModuleList()
        for number, (layers, dilation) in enumerate(zip(BLOCK_LAYERS, BLOCK_DILATIONS, strict=True), start=1):
            self.blocks.append(
                nn.ModuleList(
                    _DenseLayer(weights, f"xvector.block{number}.tdnnd{layer}", dilation)
                    for layer in range(1, layers + 1)
                )
            )
            self.transits.append(
                _ClampedPointwise(
                    weights.affine[f"xvector.transit{number}.nonlinear.batchnorm"],
                    conv[f"xvector.transit{number}.linear"],
                    carry_one=False,
                )
            )
        self.register_buffer("dense_weight", _float32(dense_weight[:, :, :, None]))
        self.register_buffer("dense_bias", _float32(dense_bias.reshape(-1, 1, 1)))
        self.eval()

    def forward(self, feat: Tensor) -> Tensor:
        """Mean-normalised log-mel fbank ``[B, T, 80]`` (10 ms hop) to embeddings ``[B, 192]``, both float32.

        Raises ``ValueError`` on another rank or bin count.
        """
        if feat.dim() != 3 or feat.shape[-1] != FEATURE_BINS:
            raise ValueError(f"CAM++ takes fbank of shape [B, T, {FEATURE_BINS}], got {list(feat.shape)}")
        if torch.is_autocast_enabled(feat.device.type):
            with torch.autocast(feat.device.type, enabled=False):
                return self._embed(feat.float())
        return self._embed(feat.float())

    def _embed(self, feat: Tensor) -> Tensor:
        x = self.conv1(feat.transpose(1, 2).unsqueeze(1)).relu_()
        for block in self.head_blocks:
            x = block(x)
        x = self.conv2(x).relu_()
        batch, _, _, frames = x.shape
        x = x.reshape(batch, HEAD_CHANNELS * (FEATURE_BINS // 8), 1, frames)
        x = _conv(x, self.tdnn_weight, self.tdnn_bias, (1, 2), (0, 2)).relu_()
        frames = x.shape[-1]
        segments: Tensor | None = None
        if frames > SEGMENT_FRAMES:
            segments = torch.arange(frames, device=x.device).div_(SEGMENT_FRAMES, rounding_mode="floor")
        for layers, transit in zip(self.blocks, self.transits, strict=True):
            assert isinstance(layers, nn.ModuleList)
            x = transit(self._dense_block(x, layers, segments))
        x = x.relu_().squeeze(2)
        std, mean = torch.std_mean(x, dim=-1, correction=1)
        pooled = torch.cat([mean, std], dim=-1)[:, :, None, None]
        return _conv(pooled, self.dense_weight, self.dense_bias).flatten(1)

    def _dense_block(self, x: Tensor, layers: nn.ModuleList, segments: Tensor | None) -> Tensor:
        """``[B, C, 1, T]`` to ``[B, 1 + C + 32 * layers, 1, T]``, row 0 the constant one."""
        batch, channels, _, frames = x.shape
        buffer = x.new_empty((batch, 1 + channels + GROWTH * len(layers), 1, frames))
        buffer[:, 0].fill_(1.0)
        width = 1 + channels
        buffer[:, 1:width].copy_(x)
        for layer in layers:
            layer(buffer[:, :width], buffer[:, width : width + GROWTH], segments)
            width += GROWTH
        return buffer


