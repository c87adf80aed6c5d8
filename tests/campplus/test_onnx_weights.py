# SPDX-License-Identifier: Apache-2.0
"""The random checkpoint's file, written in the ways that exporters and optimisers write it, and what is no CAM++."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from omni_speech_accel.campplus.model import CampplusFormatError, CampplusNet, build_campplus
from omni_speech_accel.campplus.parity import check_parity
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank
from tests.campplus.conftest import RANDOM_RELATIVE, TOLERANCES, Edit, embed, relative, session_of

FEAT = speech_like_fbank(150)[None]
FIRST = "/head/conv1/Conv"


def node_at(model: Any, name: str) -> Any:
    (node,) = (node for node in model.graph.node if node.name == name)
    return node


def holder(model: Any, name: str) -> Any:
    """The message that holds a tensor of the graph, wherever the exporter put it."""
    sources = {node.output[0]: node for node in model.graph.node}
    while name in sources and sources[name].op_type == "Identity":
        name = sources[name].input[0]
    for tensor in model.graph.initializer:
        if tensor.name == name:
            return tensor
    return sources[name].attribute[0].t


def constant(model: Any, name: str) -> np.ndarray:
    return numpy_helper.to_array(holder(model, name)).copy()


def insert(model: Any, at: Any, *nodes: Any) -> None:
    place = list(model.graph.node).index(at)
    for offset, node in enumerate(nodes):
        model.graph.node.insert(place + offset, node)


def nameless(model: Any) -> None:
    for node in model.graph.node:
        node.name = ""


def numbered(model: Any) -> None:
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{number}"


def renamed_tensors(model: Any) -> None:
    kept = {value.name for value in (*model.graph.input, *model.graph.output)}
    names: dict[str, str] = {name: name for name in ("", *kept)}
    for tensor in model.graph.initializer:
        tensor.name = names.setdefault(tensor.name, str(len(names)))
    for node in model.graph.node:
        node.name = ""
        for values in (node.input, node.output):
            values[:] = [names.setdefault(name, str(len(names))) for name in values]


def prefixed(model: Any) -> None:
    for node in model.graph.node:
        node.name = "/elsewhere" + node.name


def frozen(model: Any) -> None:
    """Every initializer as a Constant node."""
    for tensor in list(model.graph.initializer):
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]


def half_weights(model: Any) -> None:
    for tensor in list(model.graph.initializer):
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1:
            half = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{tensor.name}.half")
            model.graph.node.insert(0, helper.make_node("Cast", [half.name], [tensor.name], to=TensorProto.FLOAT))
            model.graph.initializer.remove(tensor)
            model.graph.initializer.append(half)


def norms_as_arithmetic(model: Any) -> None:
    """Every BatchNormalization as Sub, Div, Mul and Add of constants a channel, in turns on either side."""
    for number, node in enumerate([n for n in model.graph.node if n.op_type == "BatchNormalization"]):
        weight, bias, mean, var = (constant(model, name).astype(np.float64) for name in node.input[1:])
        shape = (-1,) if "dense" in node.name else (-1, 1)
        epsilon = next(a.f for a in node.attribute if a.name == "epsilon")
        values = {"mean": mean, "root": np.sqrt(var + epsilon), "weight": weight, "bias": bias}
        for name, value in values.items():
            made = numpy_helper.from_array(value.astype(np.float32).reshape(shape), f"norm{number}.{name}")
            model.graph.initializer.append(made)
        x, n = node.input[0], f"norm{number}"
        first = (n + ".weight", n + "c") if number % 2 else (n + "c", n + ".weight")
        insert(
            model,
            node,
            helper.make_node("Sub", [x, n + ".mean"], [n + "b"]),
            helper.make_node("Div", [n + "b", n + ".root"], [n + "c"]),
            helper.make_node("Mul", first, [n + "d"]),
            helper.make_node("Add", [n + "d", n + ".bias"], list(node.output[:1])),
        )
        model.graph.node.remove(node)


def convolutions_scaled_behind(model: Any) -> None:
    """Some convolutions without their bias and at half the weight, a Mul and an Add after them making up for it."""
    for number, node in enumerate([n for n in model.graph.node if n.op_type == "Conv" and len(n.input) > 2]):
        if number % 5 or "cam_layer" in node.name:
            continue
        weight, bias = constant(model, node.input[1]), constant(model, node.input[2])
        shape, name, out = (-1, *[1] * (weight.ndim - 2)), f"behind{number}", node.output[0]
        scale = np.full(len(bias), 2.0, np.float32)
        for role, value in (("w", weight / 2), ("s", scale.reshape(shape)), ("b", bias.reshape(shape))):
            model.graph.initializer.append(numpy_helper.from_array(value, name + role))
        del node.input[1:]
        node.input.append(name + "w")
        node.output[0] = name + "x"
        after = list(model.graph.node)[list(model.graph.node).index(node) + 1]
        insert(
            model,
            after,
            helper.make_node("Mul", [name + "x", name + "s"], [name + "y"]),
            helper.make_node("Add", [name + "b", name + "y"], [out]),
        )


def weights_computed(model: Any) -> None:
    """The embedding's weight out of Transpose, Reshape, Expand, Mul and Identity of constants."""
    node = node_at(model, "/xvector/dense/linear/Conv")
    weight = constant(model, node.input[1])
    flat = np.ascontiguousarray(weight[:, :, 0].T / 3).ravel()
    for name, value in (
        ("flat", flat),
        ("three", np.float32([[3.0]])),
        ("square", np.int64([weight.shape[1], weight.shape[0]])),
        ("deep", np.int64([2])),
    ):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    insert(
        model,
        node,
        helper.make_node("Reshape", ["flat", "square"], ["two"]),
        helper.make_node("Expand", ["three", "square"], ["threes"]),
        helper.make_node("Mul", ["two", "threes"], ["product"]),
        helper.make_node("Transpose", ["product"], ["turned"], perm=[1, 0]),
        helper.make_node("Unsqueeze", ["turned", "deep"], ["made"]),
        helper.make_node("Identity", ["made"], ["once"]),
        helper.make_node("Identity", ["once"], ["again"]),
    )
    node.input[1] = "again"


def joined_at_once(model: Any) -> None:
    """A dense block's Concat of a Concat as one of all its pieces."""
    pieces: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type == "Concat" and node.name.startswith("/xvector/block"):
            flat = [piece for name in node.input for piece in pieces.get(name, [name])]
            if all("cam_layer/Mul" in name for name in flat[1:]):
                pieces[node.output[0]] = flat
                node.input[:] = flat


def unfolded(model: Any) -> None:
    """Three convolutions with a BatchNormalization of their own behind them."""
    rng = np.random.default_rng(3)
    for name in (FIRST, "/head/layer1/layer1.0/shortcut/shortcut.0/Conv", "/xvector/block2/tdnnd3/linear1/Conv"):
        conv = node_at(model, name)
        names = [f"{name}.{role}" for role in ("weight", "bias", "mean", "var")]
        values = rng.uniform(0.5, 1.5, (4, len(constant(model, conv.input[2])))).astype(np.float32)
        model.graph.initializer.extend(map(numpy_helper.from_array, values, names))
        out, conv.output[0] = conv.output[0], conv.output[0] + "_raw"
        new = helper.make_node("BatchNormalization", [conv.output[0], *names], [out], epsilon=1e-3)
        insert(model, list(model.graph.node)[list(model.graph.node).index(conv) + 1], new)


def negative_and_zero_scales(model: Any) -> None:
    for name in ("block1/tdnnd2/nonlinear1/batchnorm", "transit2/nonlinear/batchnorm"):
        node = node_at(model, f"/xvector/{name}/BatchNormalization")
        scale, shift = constant(model, node.input[1]), constant(model, node.input[2])
        scale[::3] *= -1.0
        scale[1::7] = 0.0
        shift[:] = np.linspace(-1, 1, len(shift))
        for place, value in ((1, scale), (2, shift)):
            held = holder(model, node.input[place])
            held.CopyFrom(numpy_helper.from_array(value, held.name))


WRITINGS = [
    nameless,
    numbered,
    renamed_tensors,
    prefixed,
    frozen,
    half_weights,
    norms_as_arithmetic,
    convolutions_scaled_behind,
    weights_computed,
    joined_at_once,
    unfolded,
    negative_and_zero_scales,
]


class TestWhatIsCampplusHoweverWritten:
    @pytest.mark.parametrize("writing", WRITINGS, ids=lambda writing: writing.__name__)
    def test_is_read_as_onnxruntime_runs_it(self, edited: Edit, writing: Callable[[Any], None]) -> None:
        path = edited(writing)
        assert relative(embed(build_campplus(path).model, FEAT), session_of(path)(FEAT)) < RANDOM_RELATIVE

    def test_an_optimised_file_is_read(self, onnx_path: Path, tmp_path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(tmp_path / "campplus.onnx")
        onnxruntime.InferenceSession(str(onnx_path), options, providers=["CPUExecutionProvider"])
        path = tmp_path / "campplus.onnx"
        assert relative(embed(build_campplus(path).model, FEAT), session_of(path)(FEAT)) < RANDOM_RELATIVE

    @pytest.mark.parametrize("writing", [nameless, renamed_tensors, frozen, joined_at_once])
    def test_the_writing_leaves_no_bit_different(
        self, edited: Edit, net: CampplusNet, writing: Callable[[Any], None]
    ) -> None:
        made = build_campplus(edited(writing)).model.state_dict()
        assert all(torch.equal(value, made[name]) for name, value in net.state_dict().items())


def without_a_layer(model: Any) -> None:
    node = node_at(model, "/xvector/block3/tdnnd16/cam_layer/linear2/Conv")
    (after,) = (n for n in model.graph.node if node.output[0] in n.input)
    after.input[0] = node.input[0]
    model.graph.node.remove(node)


def without_a_tensor(model: Any) -> None:
    node_at(model, "/xvector/transit1/nonlinear/batchnorm/BatchNormalization").input[3] = "nowhere"


def wider(model: Any) -> None:
    held = holder(model, node_at(model, "/xvector/dense/linear/Conv").input[1])
    held.CopyFrom(numpy_helper.from_array(np.repeat(numpy_helper.to_array(held), 2, axis=0), held.name))


def spread(model: Any) -> None:
    node = node_at(model, "/xvector/block2/tdnnd1/cam_layer/linear_local/Conv")
    next(a for a in node.attribute if a.name == "dilations").ints[0] = 3


def other_segments(model: Any) -> None:
    node = node_at(model, "/xvector/block2/tdnnd1/cam_layer/AveragePool")
    next(a for a in node.attribute if a.name == "kernel_shape").ints[0] = 50


def biased(model: Any) -> None:
    node = node_at(model, "/xvector/block2/tdnnd1/cam_layer/linear_local/Conv")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(32, np.float32), "surplus"))
    node.input.append("surplus")


def another_activation(model: Any) -> None:
    node_at(model, "/xvector/tdnn/nonlinear/relu/Relu").op_type = "Elu"


def ends_on(*nodes: Any) -> Callable[[Any], None]:
    def append(model: Any) -> None:
        last = model.graph.node[-1]
        last.output[0] = "inner"
        model.graph.node.extend(nodes)

    return append


def with_surplus_weights(model: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones((192, 4), np.float32), "surplus"))
    model.graph.node.append(helper.make_node("MatMul", ["output", "surplus"], ["more"], "/head2/MatMul"))


def training(model: Any) -> None:
    node = node_at(model, "/xvector/transit1/nonlinear/batchnorm/BatchNormalization")
    node.attribute.append(helper.make_attribute("training_mode", 1))


def quantised(model: Any) -> None:
    node = node_at(model, FIRST)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "scale"))
    weight = (constant(model, node.input[1]) * 10).astype(np.int8)
    model.graph.initializer.append(numpy_helper.from_array(weight, "eight"))
    insert(model, node, helper.make_node("DequantizeLinear", ["eight", "scale"], ["wide"], "/head/conv1/Dequantize"))
    node.input[1] = "wide"


def from_an_unknown_operator(model: Any) -> None:
    node = node_at(model, FIRST)
    insert(model, node, helper.make_node("Tanh", [node.input[1]], ["bent"], "/head/conv1/Tanh"))
    node.input[1] = "bent"


def nested(model: Any) -> None:
    inner = helper.make_graph([], "inner", [], [])
    node = helper.make_node("If", ["input"], ["chosen"], "/choice/If", then_branch=inner, else_branch=inner)
    model.graph.node.insert(0, node)


def given_twice(model: Any) -> None:
    model.graph.node.append(helper.make_node("Relu", ["output"], [model.graph.node[-1].output[0]], "/again/Relu"))


def without_inputs(model: Any) -> None:
    del node_at(model, FIRST).input[1:]


def huge_constant(model: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.int64([2**20, 2**20, 2**20]), "shape"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1.0]), "one"))
    model.graph.node.insert(0, helper.make_node("Expand", ["one", "shape"], ["huge"], "/bomb/Expand"))


def doubling_constant(model: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1024, np.float32), "double0"))
    for number in range(40):
        name = f"double{number}"
        node = helper.make_node("Concat", [name, name], [f"double{number + 1}"], f"/bomb/Concat_{number}", axis=0)
        model.graph.node.insert(number, node)


REFUSED = [
    (without_a_layer, r"tdnnd16\.cam_layer\.linear2: expected one Conv \(32, 64, 1\) .* found Sigmoid node"),
    (without_a_tensor, r"takes 'nowhere', which nothing before it gives"),
    (wider, r"dense\.linear\.weight: expected shape \(192, 1024, 1\), found shape \(384"),
    (spread, r"linear_local: dilations \[3\], expected \[2\]"),
    (other_segments, r"tdnnd1\.cam_layer: AveragePool kernel_shape \[50\], expected \[100\]"),
    (biased, r"block2\.tdnnd1\.cam_layer\.linear_local has a bias"),
    (another_activation, r"xvector\.tdnn\.nonlinear: expected one Relu of .* found Elu node"),
    (
        ends_on(
            helper.make_node("ReduceL2", ["inner"], ["norm"], "/norm/ReduceL2", axes=[1]),
            helper.make_node("Div", ["inner", "norm"], ["output"], "/norm/Div"),
        ),
        r"the embedding is not the output: it goes on into ReduceL2 node '/norm/ReduceL2', Div node",
    ),
    (ends_on(helper.make_node("LpNormalization", ["inner"], ["output"])), r"goes on into unnamed LpNormalization node"),
    (with_surplus_weights, r"MatMul node '/head2/MatMul' has weights of its own"),
    (training, r"transit1\.nonlinear\.batchnorm: BatchNormalization node .* is in training mode"),
    (quantised, r"quantised to integers \(DequantizeLinear node '/head/conv1/Dequantize'\)"),
    (from_an_unknown_operator, r"head\.conv1\.weight: .* found computed by Tanh node '/head/conv1/Tanh'"),
    (nested, r"If node '/choice/If' has a graph of its own"),
    (given_twice, r"Relu node '/again/Relu' gives .* which is there already"),
    (without_inputs, r"malformed \(IndexError"),
    (huge_constant, r"Expand node '/bomb/Expand' makes a constant larger than any weight"),
    (doubling_constant, r"Concat node '/bomb/Concat_\d+' makes a constant larger than any weight"),
]


class TestWhatIsNoCampplus:
    def test_a_map_of_another_shape_is_refused_by_the_gate(self, edited: Edit) -> None:
        """``[192, 1]`` on ``[1, 192]`` is a matrix, which a reader of constants a channel does not see."""

        def matrix(model: Any) -> None:
            model.graph.initializer.append(numpy_helper.from_array(np.ones((192, 1), np.float32), "ones"))
            ends_on(helper.make_node("Mul", ["inner", "ones"], ["output"]))(model)

        path = edited(matrix)
        with pytest.raises(CampplusFormatError, match=r"embedding of shape \(192, 192\)"):
            check_parity(build_campplus(path).model, path, TOLERANCES)

    @pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
    def test_is_refused_with_what_is_wrong(self, edited: Edit, change: Callable[[Any], None], reason: str) -> None:
        with pytest.raises(CampplusFormatError, match=reason):
            build_campplus(edited(change))

    def test_another_architecture_is_refused_at_its_first_layer(self, tmp_path: Path) -> None:
        path = tmp_path / "campplus.onnx"
        torch.onnx.export(
            torch.nn.Sequential(torch.nn.Linear(80, 192), torch.nn.ReLU()),
            (torch.zeros(1, 100, 80),),
            str(path),
            dynamo=False,
        )
        with pytest.raises(CampplusFormatError, match=r"head\.conv1: expected one Conv .* found MatMul node"):
            build_campplus(path)

    @pytest.mark.parametrize(
        "content", [b"", b"no protobuf \xff\xff\xff", os.urandom(4096)], ids=["none", "text", "noise"]
    )
    def test_a_file_of_another_kind_is_an_error_of_this_package(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "campplus.onnx"
        path.write_bytes(content)
        with pytest.raises(CampplusFormatError, match=r"not an ONNX model|not a known CAM"):
            build_campplus(path)

    def test_no_file_is_file_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            build_campplus(tmp_path / "campplus.onnx")

    def test_a_file_larger_than_any_campplus_is_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "campplus.onnx"
        with open(path, "wb") as file:
            file.truncate(2**40)
        with pytest.raises(CampplusFormatError, match="more than any CAM"):
            build_campplus(path)

    def test_external_data_larger_than_any_campplus_is_not_read(self, onnx_path: Path, tmp_path: Path) -> None:
        path = tmp_path / "campplus.onnx"
        onnx.save(onnx.load(str(onnx_path)), str(path), save_as_external_data=True, location="weights.bin")
        model = onnx.load(str(path), load_external_data=False)
        entries = next(tensor for tensor in model.graph.initializer if tensor.external_data).external_data
        (length,) = (entry for entry in entries if entry.key == "length")
        length.value = str(2**40)
        onnx.save(model, str(path))
        os.truncate(tmp_path / "weights.bin", 2**41)
        with pytest.raises(CampplusFormatError, match="bytes of external data, more than any CAM"):
            build_campplus(path)

    def test_missing_external_data_is_named(self, onnx_path: Path, tmp_path: Path) -> None:
        path = tmp_path / "campplus.onnx"
        onnx.save(onnx.load(str(onnx_path)), str(path), save_as_external_data=True, location="weights.bin")
        (tmp_path / "weights.bin").unlink()
        with pytest.raises((CampplusFormatError, FileNotFoundError), match=r"weights\.bin"):
            build_campplus(path)
