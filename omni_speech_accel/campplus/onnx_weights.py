# SPDX-License-Identifier: Apache-2.0
"""Weights of CAM++ read out of a ``campplus.onnx`` by following its data from the input to the output.

Whether a BatchNorm was folded into a convolution, left beside it or written as a product and a sum, and what the nodes
and tensors are called, is the exporter's and the optimiser's choice. What the graph computes is CAM++ all the same.
What this reading takes on trust (axes, how a deviation is computed), the parity gate proves afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_speech_accel.campplus.onnx_graph import Array, CampplusFormatError, Graph, attributes, describe

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

# 3D-Speaker CAMLayer.seg_pooling: frames per context segment, after the stride-2 TDNN.
SEGMENT_FRAMES = 100

_QUANTISED = frozenset(
    {
        "ConvInteger",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "QuantizeLinear",
    }
)


@dataclass(frozen=True)
class ConvSpec:
    """What one convolution looks like. ``path``: the module that it is in 3D-Speaker's CAM++."""

    path: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass
class CampplusWeights:
    """Float64 weight and bias of every convolution, its BatchNorm folded in."""

    conv: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    # scale and shift of the BatchNorms that stand before an activation and a convolution
    affine: dict[str, tuple[Array, Array]] = field(default_factory=dict)


def conv_specs() -> list[ConvSpec]:
    """Every convolution of CAM++, in forward order."""

    def plane(path: str, inputs: int, kernel: int, stride: tuple[int, int]) -> ConvSpec:
        pad = (kernel - 1) // 2
        return ConvSpec(path, (HEAD_CHANNELS, inputs, kernel, kernel), stride, (pad, pad), (1, 1))

    def pointwise(path: str, outputs: int, inputs: int) -> ConvSpec:
        return ConvSpec(path, (outputs, inputs, 1), (1,), (0,), (1,))

    specs = [plane("head.conv1", 1, 3, (1, 1))]
    for layer in ("head.layer1", "head.layer2"):
        for index in (0, 1):
            block = f"{layer}.{index}"
            specs.append(plane(f"{block}.conv1", HEAD_CHANNELS, 3, (2, 1) if index == 0 else (1, 1)))
            specs.append(plane(f"{block}.conv2", HEAD_CHANNELS, 3, (1, 1)))
            if index == 0:
                specs.append(plane(f"{block}.shortcut.0", HEAD_CHANNELS, 1, (2, 1)))
    specs.append(plane("head.conv2", HEAD_CHANNELS, 3, (2, 1)))
    tdnn_inputs = HEAD_CHANNELS * FEATURE_BINS // 8
    specs.append(ConvSpec("xvector.tdnn.linear", (INITIAL_CHANNELS, tdnn_inputs, 5), (2,), (2,), (1,)))
    channels = INITIAL_CHANNELS
    for block_index, (layers, dilation) in enumerate(zip(BLOCK_LAYERS, BLOCK_DILATIONS, strict=True), start=1):
        for layer_index in range(1, layers + 1):
            path = f"xvector.block{block_index}.tdnnd{layer_index}"
            specs += [
                pointwise(f"{path}.linear1", BOTTLENECK, channels),
                ConvSpec(f"{path}.cam_layer.linear_local", (GROWTH, BOTTLENECK, 3), (1,), (dilation,), (dilation,)),
                pointwise(f"{path}.cam_layer.linear1", CAM_HIDDEN, BOTTLENECK),
                pointwise(f"{path}.cam_layer.linear2", GROWTH, CAM_HIDDEN),
            ]
            channels += GROWTH
        specs.append(pointwise(f"xvector.transit{block_index}.linear", channels // 2, channels))
        channels //= 2
    specs.append(pointwise("xvector.dense.linear", EMBEDDING_SIZE, 2 * channels))
    return specs


def read_campplus_weights(model: Any) -> CampplusWeights:
    """Every weight of CAM++ out of a parsed ``campplus.onnx`` (an ``onnx.ModelProto``).

    Raises :class:`CampplusFormatError` naming the first place where the file's flow of data is not CAM++'s. Nothing is
    ever left at a default value: a silently missing tensor gives embeddings that look plausible and are of another
    speaker.
    """
    for node in model.graph.node:
        if node.op_type in _QUANTISED:
            raise CampplusFormatError(f"not a known CAM++ export: quantised to integers ({describe(node)})")
    try:
        return _Reading(Graph(model)).weights
    except CampplusFormatError as error:
        raise CampplusFormatError(f"not a known CAM++ export: {error}") from error
    except Exception as error:
        # A node without the inputs or attributes that its operator must have, and the like.
        raise CampplusFormatError(f"not a known CAM++ export: malformed ({type(error).__name__}: {error})") from error


class _Reading:
    """CAM++ followed through a graph from its input to its output."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.weights = CampplusWeights()
        self._specs = {spec.path: spec for spec in conv_specs()}
        self._claimed: set[str] = set()
        x = self._head(graph.input)
        x = self._follow(self._conv("xvector.tdnn.linear", x), "Relu", "xvector.tdnn.nonlinear")
        channels = INITIAL_CHANNELS
        for block, layers in enumerate(BLOCK_LAYERS, start=1):
            pieces = [x]
            for layer in range(1, layers + 1):
                path = f"xvector.block{block}.tdnnd{layer}"
                pieces.append(self._dense_layer(path, x, channels))
                channels += GROWTH
                x = self._join(pieces, path)
            path = f"xvector.transit{block}"
            x = self._conv(f"{path}.linear", self._activated(f"{path}.nonlinear.batchnorm", x, channels))
            channels //= 2
        x = self._follow(x, "Relu", "xvector.out_nonlinear")
        x = self._conv("xvector.dense.linear", self._statistics(x))
        if x != graph.output:
            raise CampplusFormatError(f"the embedding is not the output: it goes on into {self._found(x)}")
        for node in (node for users in graph.users.values() for node in users if node.output[0] not in self._claimed):
            if any(map(graph.is_weight, node.input)):
                raise CampplusFormatError(f"{describe(node)} has weights of its own that no layer of CAM++ has")

    def _head(self, x: str) -> str:
        x = self._follow(self._conv("head.conv1", x), "Relu", "head.bn1")
        for path in ("head.layer1.0", "head.layer1.1", "head.layer2.0", "head.layer2.1"):
            inner = self._follow(self._conv(f"{path}.conv1", x), "Relu", f"{path}.bn1")
            rest = self._conv(f"{path}.shortcut.0", x) if f"{path}.shortcut.0" in self._specs else x
            x = self._follow(self._both("Add", self._conv(f"{path}.conv2", inner), rest, path), "Relu", path)
        return self._follow(self._conv("head.conv2", x), "Relu", "head.bn2")

    def _dense_layer(self, path: str, x: str, channels: int) -> str:
        x = self._activated(f"{path}.nonlinear1.batchnorm", x, channels)
        hidden = self._follow(self._conv(f"{path}.linear1", x), "Relu", f"{path}.nonlinear2")
        path = f"{path}.cam_layer"
        local = self._conv(f"{path}.linear_local", hidden)
        if self.weights.conv[f"{path}.linear_local"][1].any():
            raise CampplusFormatError(f"{path}.linear_local has a bias")
        mean = self._follow(hidden, "ReduceMean", path)
        pooled = self._follow(hidden, "AveragePool", path, kernel_shape=SEGMENT_FRAMES, strides=SEGMENT_FRAMES)
        context = self._conv(f"{path}.linear1", self._both("Add", mean, pooled, path))
        mask = self._conv(f"{path}.linear2", self._follow(context, "Relu", f"{path}.relu"))
        return self._both("Mul", local, self._follow(mask, "Sigmoid", f"{path}.sigmoid"), path)

    def _statistics(self, x: str) -> str:
        """Mean and deviation, joined. How the deviation is computed differs by exporter; the gate proves it."""
        means = {node.output[0] for node in self.graph.users.get(x, ()) if node.op_type == "ReduceMean"}
        pairs = [name for pieces, name in self.graph.joined.items() if len(pieces) == 2 and pieces[0] in means]
        if len(pairs) != 1:
            raise CampplusFormatError(f"xvector.stats: no mean and deviation of {x!r}, found {self._found(x)}")
        return pairs[0]

    def _join(self, pieces: Sequence[str], path: str) -> str:
        if (joined := self.graph.joined.get(tuple(pieces))) is None:
            raise CampplusFormatError(f"{path}: nothing joins its output to its input, found {self._found(pieces[-1])}")
        return joined

    def _found(self, x: str) -> str:
        """What takes a value, for an error."""
        users = [describe(node) for node in self.graph.users.get(x, ())]
        ends = ["the output"] if x == self.graph.output else []
        return ", ".join([*users[:4], *ends]) or "nothing"

    def _claim(self, node: Any) -> str:
        self._claimed.add(node.output[0])
        return self.graph.origin(node.output[0])

    def _follow(self, x: str, kind: str, path: str, **expected: int) -> str:
        """What the one node of this kind gives that takes ``x``. ``expected``: attributes of one axis."""
        nodes = [node for node in self.graph.users.get(x, ()) if node.op_type == kind]
        if len(nodes) != 1:
            raise CampplusFormatError(f"{path}: expected one {kind} of {x!r}, found {self._found(x)}")
        for name, value in expected.items():
            if (found := attributes(nodes[0]).get(name)) is None or list(found) != [value]:
                raise CampplusFormatError(f"{path}: {kind} {name} {found}, expected [{value}]")
        return self._claim(nodes[0])

    def _both(self, kind: str, a: str, b: str, path: str) -> str:
        """What the node of this kind gives that takes ``a`` and ``b``."""
        for node in self.graph.users.get(a, ()):
            if node.op_type == kind and sorted(self.graph.data(node)) == sorted((a, b)):
                return self._claim(node)
        raise CampplusFormatError(f"{path}: no {kind} of {a!r} and {b!r}, found {self._found(a)}")

    def _tensor(self, name: str, shape: tuple[int, ...], what: str) -> Array:
        value = self.graph.tensor(name)
        if isinstance(value, str) or value.shape != shape:
            found = value if isinstance(value, str) else f"shape {value.shape}"
            raise CampplusFormatError(f"{what}: expected shape {shape}, found {found}")
        return value

    def _conv(self, path: str, x: str) -> str:
        """The convolution of ``x`` at this place, and every per-channel map that follows it, into the weights."""
        spec = self._specs[path]
        nodes = [node for node in self.graph.users.get(x, ()) if node.op_type == "Conv"]
        # A residual block and a mask take their input through several; which is which, their shapes tell.
        if len(nodes) > 1:
            nodes = [node for node in nodes if getattr(self.graph.tensor(node.input[1]), "shape", None) == spec.shape]
        if len(nodes) != 1:
            raise CampplusFormatError(f"{path}: expected one Conv {spec.shape} of {x!r}, found {self._found(x)}")
        (node,) = nodes
        found = attributes(node)
        rank = len(spec.shape) - 2
        for name, value, default in (
            ("strides", list(spec.stride), [1] * rank),
            ("dilations", list(spec.dilation), [1] * rank),
            ("pads", list(spec.padding) * 2, [0] * (2 * rank)),
            ("group", 1, 1),
            ("auto_pad", b"NOTSET", b"NOTSET"),
        ):
            if found.get(name, default) != value:
                raise CampplusFormatError(f"{path}: {name} {found[name]!r}, expected {value!r}")
        weight = self._tensor(node.input[1], spec.shape, f"{path}.weight")
        bias = np.zeros(spec.shape[0])
        if len(node.input) > 2 and node.input[2]:
            bias = self._tensor(node.input[2], spec.shape[:1], f"{path}.bias")
        x = self._claim(node)
        x, scale, shift = self._maps(x, spec.shape[0], path, self.graph.users.get(x, ()))
        self.weights.conv[path] = (weight * scale.reshape([-1] + [1] * (rank + 1)), bias * scale + shift)
        return x

    def _activated(self, path: str, x: str, channels: int) -> str:
        """The BatchNorm of ``x``, as whatever per-channel maps it is written, and its activation."""
        starts = [node for node in self.graph.users.get(x, ()) if self._map(node, channels, path) is not None]
        if len(starts) != 1:
            raise CampplusFormatError(f"{path}: expected one BatchNormalization of {x!r}, found {self._found(x)}")
        x, scale, shift = self._maps(x, channels, path, starts)
        self.weights.affine[path] = (scale, shift)
        return self._follow(x, "Relu", path)

    def _maps(self, x: str, channels: int, path: str, users: Sequence[Any]) -> tuple[str, Array, Array]:
        """The value behind the per-channel maps that begin with ``users`` of ``x``, and their scale and shift."""
        scale, shift = np.ones(channels), np.zeros(channels)
        while len(users) == 1 and x != self.graph.output:
            step = self._map(users[0], channels, path)
            if step is None:
                break
            factor, offset = step
            x, scale, shift = self._claim(users[0]), scale * factor, shift * factor + offset
            users = self.graph.users.get(x, ())
        return x, scale, shift

    def _map(self, node: Any, channels: int, path: str) -> tuple[Array, Array] | None:
        """Scale and shift of a BatchNormalization, or of arithmetic with one constant a channel."""
        one, zero = np.ones(channels), np.zeros(channels)
        if node.op_type == "BatchNormalization":
            if attributes(node).get("training_mode"):
                raise CampplusFormatError(f"{path}: {describe(node)} is in training mode")
            roles = ("weight", "bias", "running_mean", "running_var")
            weight, bias, mean, var = (
                self._tensor(node.input[place], (channels,), f"{path}.{role}") for place, role in enumerate(roles, 1)
            )
            scale = weight / np.sqrt(var + float(attributes(node).get("epsilon", 1e-5)))
            return scale, bias - mean * scale
        if node.op_type not in ("Add", "Sub", "Mul", "Div") or len(self.graph.data(node)) != 1:
            return None
        first = self.graph.data(node) == [self.graph.origin(node.input[0])]
        value = self.graph.tensor(node.input[1] if first else node.input[0])
        if isinstance(value, str) or value.size not in (1, channels) or (node.op_type == "Div" and not first):
            return None
        constant = np.broadcast_to(value.ravel(), (channels,))
        if node.op_type in ("Mul", "Div"):
            return constant if node.op_type == "Mul" else one / constant, zero
        if node.op_type == "Add":
            return one, constant
        return (one, -constant) if first else (-one, constant)
