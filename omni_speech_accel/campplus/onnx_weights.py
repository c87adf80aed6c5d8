# SPDX-License-Identifier: Apache-2.0
"""Weights of CAM++ read out of a ``campplus.onnx`` by node names.

Why by node and not by initializer name: the exporter folds the convolutions that a BatchNorm follows directly, and the
folded tensors are called ``onnx::Conv_4411`` with a number that moves with every exporter release. The node that
consumes them keeps the module path (``/xvector/block1/tdnnd1/linear1/Conv``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# CAM++ as 3D-Speaker trains it for 80-bin fbank: D-TDNN blocks of 12, 24 and 16 layers, growth 32, bottleneck 128.
BLOCK_LAYERS = (12, 24, 16)
BLOCK_DILATIONS = (1, 2, 2)
GROWTH = 32
BOTTLENECK = 128
CAM_HIDDEN = BOTTLENECK // 2
HEAD_CHANNELS = 32
INITIAL_CHANNELS = 128
FEATURE_BINS = 80
EMBEDDING_SIZE = 192

Array = npt.NDArray[np.float64]


class CampplusFormatError(ValueError):
    """The file is not a CAM++ export that this package knows how to read."""


@dataclass(frozen=True)
class ConvSpec:
    """Where one convolution sits in the export, and what it must look like there."""

    path: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    # Module path of the BatchNorm behind this convolution; its node is absent when the exporter folded it.
    norm: str | None = None
    # The layer itself has a bias (as opposed to one that only folding can have put there).
    bias: bool = False


@dataclass
class CampplusWeights:
    """Float64 weights of every layer; a convolution's BatchNorm is already folded into it."""

    conv: dict[str, tuple[Array, Array | None]] = field(default_factory=dict)
    # scale and shift of the BatchNorms that stand before an activation and a convolution
    affine: dict[str, tuple[Array, Array]] = field(default_factory=dict)


def conv_specs() -> list[ConvSpec]:
    """Every convolution of CAM++, in forward order."""

    def plane(path: str, inputs: int, kernel: int, stride: tuple[int, int], norm: str) -> ConvSpec:
        pad = (kernel - 1) // 2
        return ConvSpec(path, (HEAD_CHANNELS, inputs, kernel, kernel), stride, (pad, pad), (1, 1), norm=norm)

    def pointwise(path: str, outputs: int, inputs: int, *, norm: str | None = None, bias: bool = False) -> ConvSpec:
        return ConvSpec(path, (outputs, inputs, 1), (1,), (0,), (1,), norm=norm, bias=bias)

    specs = [plane("head.conv1", 1, 3, (1, 1), "head.bn1")]
    for layer in ("head.layer1", "head.layer2"):
        for index in (0, 1):
            block = f"{layer}.{index}"
            specs.append(plane(f"{block}.conv1", HEAD_CHANNELS, 3, (2, 1) if index == 0 else (1, 1), f"{block}.bn1"))
            specs.append(plane(f"{block}.conv2", HEAD_CHANNELS, 3, (1, 1), f"{block}.bn2"))
            if index == 0:
                specs.append(plane(f"{block}.shortcut.0", HEAD_CHANNELS, 1, (2, 1), f"{block}.shortcut.1"))
    specs.append(plane("head.conv2", HEAD_CHANNELS, 3, (2, 1), "head.bn2"))

    tdnn_inputs = HEAD_CHANNELS * FEATURE_BINS // 8
    specs.append(
        ConvSpec(
            "xvector.tdnn.linear",
            (INITIAL_CHANNELS, tdnn_inputs, 5),
            (2,),
            (2,),
            (1,),
            norm="xvector.tdnn.nonlinear.batchnorm",
        )
    )
    channels = INITIAL_CHANNELS
    for block_index, (layers, dilation) in enumerate(zip(BLOCK_LAYERS, BLOCK_DILATIONS, strict=True), start=1):
        for layer_index in range(1, layers + 1):
            path = f"xvector.block{block_index}.tdnnd{layer_index}"
            specs += [
                pointwise(f"{path}.linear1", BOTTLENECK, channels, norm=f"{path}.nonlinear2.batchnorm"),
                ConvSpec(f"{path}.cam_layer.linear_local", (GROWTH, BOTTLENECK, 3), (1,), (dilation,), (dilation,)),
                pointwise(f"{path}.cam_layer.linear1", CAM_HIDDEN, BOTTLENECK, bias=True),
                pointwise(f"{path}.cam_layer.linear2", GROWTH, CAM_HIDDEN, bias=True),
            ]
            channels += GROWTH
        last = block_index == len(BLOCK_LAYERS)
        specs.append(
            pointwise(
                f"xvector.transit{block_index}.linear",
                channels // 2,
                channels,
                norm="xvector.out_nonlinear.batchnorm" if last else None,
            )
        )
        channels //= 2
    specs.append(
        pointwise("xvector.dense.linear", EMBEDDING_SIZE, 2 * channels, norm="xvector.dense.nonlinear.batchnorm")
    )
    return specs


def affine_specs() -> list[tuple[str, int]]:
    """Module path and channel count of every BatchNorm that no convolution can absorb."""
    specs = []
    channels = INITIAL_CHANNELS
    for block_index, layers in enumerate(BLOCK_LAYERS, start=1):
        for layer_index in range(1, layers + 1):
            specs.append((f"xvector.block{block_index}.tdnnd{layer_index}.nonlinear1.batchnorm", channels))
            channels += GROWTH
        specs.append((f"xvector.transit{block_index}.nonlinear.batchnorm", channels))
        channels //= 2
    return specs


def module_path(node_name: str) -> str:
    """``/head/layer1/layer1.0/conv1/Conv`` -> ``head.layer1.0.conv1``.

    The exporter writes the scope of a numbered Sequential child as ``parent/parent.0``, hence the merge.
    """
    parts: list[str] = []
    for part in [p for p in node_name.split("/") if p][:-1]:
        if parts and part.startswith(parts[-1] + "."):
            parts[-1] = part
        else:
            parts.append(part)
    return ".".join(parts)


class _Graph:
    """Nodes by module path and constant tensors by value name."""

    def __init__(self, model: Any) -> None:
        from onnx import numpy_helper

        self._to_array = numpy_helper.to_array
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._alias: dict[str, str] = {}
        self.nodes: dict[tuple[str, str], Any] = {}
        self.claimed: set[str] = set()
        self.model = model
        for node in model.graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self._tensors[node.output[0]] = attribute.t
            elif node.op_type == "Identity":
                # equal tensors are written once; the others become Identity nodes of it
                self._alias[node.output[0]] = node.input[0]
            elif node.op_type in ("Conv", "BatchNormalization"):
                self.nodes[node.op_type, module_path(node.name)] = node

    def tensor(self, name: str) -> Array | None:
        while name in self._alias:
            name = self._alias[name]
        stored = self._tensors.get(name)
        return None if stored is None else np.asarray(self._to_array(stored), dtype=np.float64)

    def is_weight(self, name: str) -> bool:
        while name in self._alias:
            name = self._alias[name]
        stored = self._tensors.get(name)
        # TensorProto.FLOAT, FLOAT16, DOUBLE, BFLOAT16; scalars are constants of the arithmetic, not weights
        return stored is not None and stored.data_type in (1, 10, 11, 16) and int(np.prod(stored.dims)) > 1


def _attributes(node: Any) -> dict[str, Any]:
    return {a.name: (list(a.ints) if a.ints else a.f if a.type == 1 else a.i) for a in node.attribute}


def _read_affine(graph: _Graph, path: str, channels: int, problems: list[str]) -> tuple[Array, Array] | None:
    """Scale and shift of the BatchNorm at ``path``."""
    node = graph.nodes.get(("BatchNormalization", path))
    if node is None:
        problems.append(f"no BatchNormalization node for {path}")
        return None
    graph.claimed.add(node.name)
    values = []
    for role, name in zip(("weight", "bias", "running_mean", "running_var"), node.input[1:5], strict=True):
        value = graph.tensor(name)
        if value is None or value.shape != (channels,):
            found = "nothing" if value is None else f"shape {value.shape}"
            problems.append(f"{path}.{role}: expected shape {(channels,)}, found {found}")
            return None
        values.append(value)
    weight, bias, mean, var = values
    scale = weight / np.sqrt(var + float(_attributes(node).get("epsilon", 1e-5)))
    return scale, bias - mean * scale


def _read_conv(graph: _Graph, spec: ConvSpec, problems: list[str]) -> tuple[Array, Array | None] | None:
    node = graph.nodes.get(("Conv", spec.path))
    if node is None:
        problems.append(f"no Conv node for {spec.path}")
        return None
    graph.claimed.add(node.name)
    attributes = _attributes(node)
    rank = len(spec.shape) - 2
    expected = {
        "strides": list(spec.stride),
        "dilations": list(spec.dilation),
        "pads": list(spec.padding) * 2,
        "group": 1,
    }
    defaults: dict[str, Any] = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * (2 * rank), "group": 1}
    for name, value in expected.items():
        if attributes.get(name, defaults[name]) != value:
            problems.append(f"{spec.path}: {name} {attributes.get(name, defaults[name])}, expected {value}")
    weight = graph.tensor(node.input[1])
    if weight is None or weight.shape != spec.shape:
        found = "nothing" if weight is None else f"shape {weight.shape}"
        problems.append(f"{spec.path}.weight: expected shape {spec.shape}, found {found}")
        return None
    bias: Array | None = None
    if len(node.input) > 2 and node.input[2]:
        bias = graph.tensor(node.input[2])
        if bias is None or bias.shape != spec.shape[:1]:
            found = "nothing" if bias is None else f"shape {bias.shape}"
            problems.append(f"{spec.path}.bias: expected shape {spec.shape[:1]}, found {found}")
            return None
    if spec.norm is not None and ("BatchNormalization", spec.norm) in graph.nodes:
        affine = _read_affine(graph, spec.norm, spec.shape[0], problems)
        if affine is None:
            return None
        scale, shift = affine
        weight = weight * scale.reshape(-1, *([1] * (rank + 1)))
        bias = shift if bias is None else bias * scale + shift
    elif bias is None and (spec.norm is not None or spec.bias):
        what = f"neither a bias nor a BatchNormalization node {spec.norm}" if spec.norm else "no bias"
        problems.append(f"{spec.path}: {what}")
        return None
    return weight, bias


def read_campplus_weights(model: Any) -> CampplusWeights:
    """Every weight of CAM++ out of a parsed ``campplus.onnx`` (an ``onnx.ModelProto``).

    Raises :class:`CampplusFormatError` with every missing, misshapen or unknown part. Nothing is ever left at a
    default value: a silently missing tensor gives embeddings that look plausible and are of another speaker.
    """
    graph = _Graph(model)
    weights = CampplusWeights()
    problems: list[str] = []
    for spec in conv_specs():
        conv = _read_conv(graph, spec, problems)
        if conv is not None:
            weights.conv[spec.path] = conv
    for path, channels in affine_specs():
        affine = _read_affine(graph, path, channels, problems)
        if affine is not None:
            weights.affine[path] = affine
    for node in model.graph.node:
        if node.op_type in ("Constant", "Identity") or node.name in graph.claimed:
            continue
        if any(graph.is_weight(name) for name in node.input):
            problems.append(f"unknown {node.op_type} node {node.name!r} with weights of its own")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CampplusFormatError(f"not a known CAM++ export: {shown}")
    return weights


def parse_onnx(path: str | Path) -> Any:
    """``onnx.load`` with this module's error for a file that is no ONNX model. ``FileNotFoundError`` passes through."""
    import onnx

    try:
        model = onnx.load(str(path))
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CampplusFormatError(f"{path}: not an ONNX model ({error})") from error
    if not model.graph.node:
        raise CampplusFormatError(f"{path}: not an ONNX model (no nodes)")
    return model
