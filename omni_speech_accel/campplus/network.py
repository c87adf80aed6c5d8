# SPDX-License-Identifier: Apache-2.0
"""CAM++ for inference: 80-bin fbank in, 192-dimensional speaker embedding out.

The network of "CAM++: A Fast and Efficient Network for Speaker Verification Using Context-Aware Masking"
(Wang et al., 2023): a residual 2-D convolution head (FCM), three densely connected TDNN blocks whose every layer is
gated by a context-aware mask (CAM), statistics pooling, one linear layer. On an accelerator it is bound by the number
of its kernels and by those too narrow to fill the device, hence this layout (as a graph on an H200 4.2 ms, against 5.0
for the modules as published):

* A dense block is one buffer that each layer writes its 32 channels into, instead of 52 concatenations of a growing
  tensor. Its frames are padded to whole mask segments, so that a segment is an axis: pooling is one sum, and a mask is
  computed once per 100-frame segment and broadcast, not gathered, over its frames.
* Two rows lead the channels of that buffer. One is the constant one, with which every pointwise map carries its bias as
  a column of its weight. The other is zero, and hugely negative in the padding, which the bottleneck's ReLU thereby
  turns into exact zeros: padding is never seen.
* ``relu(s * x + b)`` in front of a linear map equals that map, rescaled, of ``x`` clamped at ``-b / s``: the BatchNorm
  and the activation of a dense layer are one clamp.

Everything is float32 whatever torch's default dtype or the autocast state; on CUDA the convolutions ask for full
precision per call, because TF32 costs 1.1e-3 of relative error in the embedding and its switch is a process-wide flag
that other threads move.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_speech_accel.campplus.onnx_graph import Array
from omni_speech_accel.campplus.onnx_weights import (
    BLOCK_DILATIONS,
    BLOCK_LAYERS,
    FEATURE_BINS,
    GROWTH,
    HEAD_CHANNELS,
    SEGMENT_FRAMES,
    CampplusWeights,
)

_FLOAT_MAX = float(np.finfo(np.float32).max)

# Leading rows of a dense block's buffer: the one, and the row that silences the padding.
_LEAD = 2
# Below anything that the bottleneck can add up to, and far from the end of float32.
_SILENCE = -1e30


def _with_bias(matrix: Array, bias: Array | float) -> Array:
    """``[outputs, C]`` as ``[outputs, 1 + C]`` for an input that has the constant one in front."""
    column = np.broadcast_to(np.asarray(bias, dtype=np.float64), matrix.shape[:1])
    return np.concatenate([column[:, None], matrix], axis=1)


def _passing_one(matrix: Array, one: float = 1.0) -> Array:
    """``[outputs, C]`` as ``[1 + outputs, C]``: first output ``one`` times the first input."""
    row = np.zeros((1, matrix.shape[1]))
    row[0, 0] = one
    return np.concatenate([row, matrix])


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """2-D convolution in full float32; ``bias`` is ``[C, 1, 1]``."""
    out: Tensor
    if x.is_cuda and torch.version.cuda is not None:
        # The flag-free entry point: allow_tf32 is an argument of this call, so no process-wide switch is read or set.
        out = torch.ops.aten.cudnn_convolution(
            x, weight, padding, stride, dilation, groups=1, benchmark=False, deterministic=True, allow_tf32=False
        )
        return out if bias is None else out.add_(bias)
    out = F.conv2d(x, weight, None if bias is None else bias.flatten(), stride, padding, dilation)
    return out


def _float32(value: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))


class _HeadConv(nn.Module):
    """2-D convolution with its BatchNorm folded in."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: tuple[Array, Array], stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        weight, bias = weights
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
        out: Tensor = self.conv2(self.conv1(x).relu_())
        return out.add_(x if self.shortcut is None else self.shortcut(x)).relu_()


def _clamp_form(affine: tuple[Array, Array], weight: Array, bias: Array) -> tuple[Array, Array, Array]:
    """Rewrite ``weight @ relu(scale * x + shift) + bias`` as ``matrix @ [1; clamp(x, low, high)]``.

    ``weight`` is ``[outputs, C]``; ``low`` and ``high`` are ``[C]``, ``matrix`` is ``[outputs, 1 + C]``.
    """
    scale, shift = affine
    flat = scale == 0
    threshold = np.where(flat, 0.0, -shift / np.where(flat, 1.0, scale))
    low = np.where(scale < 0, -_FLOAT_MAX, threshold)
    high = np.where(scale > 0, _FLOAT_MAX, threshold)
    constant = weight @ np.where(flat, np.maximum(shift, 0.0), shift)
    matrix = _with_bias(weight * scale, constant + bias)
    return np.clip(low, -_FLOAT_MAX, _FLOAT_MAX), np.clip(high, -_FLOAT_MAX, _FLOAT_MAX), matrix


class _ClampedPointwise(nn.Module):
    """BatchNorm, ReLU and a pointwise convolution on a dense block's buffer ``[B, _LEAD + C, 1, T]``.

    With ``silent`` a first output passes the one on, and all outputs are hugely negative in the padding.
    """

    low: Tensor
    high: Tensor
    weight: Tensor

    def __init__(self, affine: tuple[Array, Array], conv: tuple[Array, Array], *, silent: bool) -> None:
        super().__init__()
        low, high, matrix = _clamp_form(affine, conv[0][:, :, 0], conv[1])
        if silent:
            matrix = _passing_one(matrix)
        lead = np.full(_LEAD, _FLOAT_MAX)
        self.register_buffer("low", _float32(np.concatenate([-lead, low]).reshape(-1, 1, 1)))
        self.register_buffer("high", _float32(np.concatenate([lead, high]).reshape(-1, 1, 1)))
        matrix = np.insert(matrix, 1, 1.0 if silent else 0.0, axis=1)
        self.register_buffer("weight", _float32(matrix[:, :, None, None]))

    def forward(self, x: Tensor) -> Tensor:
        return _conv(torch.clamp(x, self.low, self.high), self.weight)


def _rows_times(rows: Tensor, matrix: Tensor) -> Tensor:
    """``[B, S, C]`` by ``[outputs, C]`` to ``[B, S, outputs]``, as a product and a sum.

    For a handful of rows. A matrix product would be subject to the process-wide TF32 switch, and torch's CUDA
    convolution takes 10 us on such a shape, against 4.
    """
    return (rows.unsqueeze(2) * matrix).sum(-1)


class _DenseLayer(nn.Module):
    """One D-TDNN layer: bottleneck, local convolution, and the context-aware mask on its 32 outputs."""

    taps: Tensor
    mask1: Tensor
    mask2: Tensor

    def __init__(self, weights: CampplusWeights, path: str, dilation: int) -> None:
        super().__init__()
        self.bottleneck = _ClampedPointwise(
            weights.affine[f"{path}.nonlinear1.batchnorm"], weights.conv[f"{path}.linear1"], silent=True
        )
        self.dilation = dilation
        # The three taps as one pointwise convolution with three times the outputs. As a convolution of three taps its
        # 32 outputs keep ten blocks of a GPU busy: 4.8 ms for the whole network on an H200, against 4.2.
        local, _ = weights.conv[f"{path}.cam_layer.linear_local"]
        taps = np.concatenate([_with_bias(local[:, :, tap], 0.0) for tap in range(3)])
        self.register_buffer("taps", _float32(taps[:, :, None, None]))
        weight1, bias1 = weights.conv[f"{path}.cam_layer.linear1"]
        weight2, bias2 = weights.conv[f"{path}.cam_layer.linear2"]
        # The context is a mean plus a segment mean, so the one arrives as two: halve what multiplies it.
        self.register_buffer("mask1", _float32(_passing_one(_with_bias(weight1[:, :, 0], bias1 / 2), one=0.5)))
        self.register_buffer("mask2", _float32(_with_bias(weight2[:, :, 0], bias2)))

    def forward(self, x: Tensor, out: Tensor, pooling: Tensor) -> None:
        """``x`` ``[B, _LEAD + C, 1, T]`` to ``out`` ``[B, 32, S, T / S]``; ``pooling`` from :func:`_pooling`."""
        hidden = self.bottleneck(x).relu_()
        batch, rows, _, frames = hidden.shape
        sums = hidden.view(batch, rows, len(pooling), -1).sum(-1)
        context = (sums.unsqueeze(2) * pooling).sum(-1).transpose(1, 2)
        mask = _rows_times(_rows_times(context, self.mask1).relu_(), self.mask2).sigmoid_()
        before, local, after = _conv(hidden, self.taps).view(batch, 3, GROWTH, frames).unbind(1)
        local[..., self.dilation :] += before[..., : -self.dilation]
        local[..., : -self.dilation] += after[..., self.dilation :]
        torch.mul(local.view(out.shape), mask.transpose(1, 2).unsqueeze(-1), out=out)


def _pooling(frames: int, like: Tensor) -> Tensor:
    """``[S, S]``: row ``s`` makes the context of segment ``s``, its mean plus the mean of all, out of segment sums."""
    segments = -(-frames // SEGMENT_FRAMES)
    last = frames - SEGMENT_FRAMES * (segments - 1)
    pooling = like.new_full((segments, segments), 1.0 / frames)
    pooling.diagonal()[:-1].add_(1.0 / SEGMENT_FRAMES)
    pooling[-1, -1:].add_(1.0 / last)
    return pooling


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
                    silent=False,
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
        kind = feat.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
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
        pooling = _pooling(frames, x)
        if len(pooling) > 1:
            x = F.pad(x, (0, len(pooling) * SEGMENT_FRAMES - frames))
        for layers, transit in zip(self.blocks, self.transits, strict=True):
            assert isinstance(layers, nn.ModuleList)
            x = transit(self._dense_block(x, layers, frames, pooling))
        x = x[:, :, 0, :frames].relu_()
        std, mean = torch.std_mean(x, dim=-1, correction=1)
        pooled = torch.cat([mean, std], dim=-1)[:, :, None, None]
        return _conv(pooled, self.dense_weight, self.dense_bias).flatten(1)

    def _dense_block(self, x: Tensor, layers: nn.ModuleList, frames: int, pooling: Tensor) -> Tensor:
        """``[B, C, 1, T]``, of which ``frames`` are no padding, to ``[B, _LEAD + C + 32 * layers, 1, T]``."""
        batch, channels, _, padded = x.shape
        width = _LEAD + channels
        buffer = x.new_empty((batch, width + GROWTH * len(layers), 1, padded))
        buffer[:, 0].fill_(1.0)
        buffer[:, 1, :, :frames].fill_(0.0)
        buffer[:, 1, :, frames:].fill_(_SILENCE)
        buffer[:, _LEAD:width].copy_(x)
        for layer in layers:
            out = buffer[:, width : width + GROWTH].view(batch, GROWTH, len(pooling), -1)
            layer(buffer[:, :width], out, pooling)
            width += GROWTH
        return buffer
