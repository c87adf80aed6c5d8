# SPDX-License-Identifier: Apache-2.0
"""``speech_tokenizer_v2_25hz.onnx`` with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from omni_speech_accel.synthetic.random_weights import FloatArray, layer_weight

MODEL_NAME = "speech_tokenizer_v2_25hz"

# s3tokenizer.utils.onnx2torch finds these six by the initializer's own name, all others by their node's name.
_NAMED_INITIALIZERS = {
    "encoder.conv1.weight": "onnx::Conv_2216",
    "encoder.conv1.bias": "onnx::Conv_2217",
    "encoder.conv2.weight": "onnx::Conv_2218",
    "encoder.conv2.bias": "onnx::Conv_2219",
    "quantizer._codebook.project_down.weight": "onnx::MatMul_2536",
    "quantizer._codebook.project_down.bias": "quantizer.project_in.bias",
}


def tokenizer_weights(seed: int) -> dict[str, FloatArray]:
    """State dict of ``S3TokenizerV2``."""
    import s3tokenizer
    import torch

    with torch.device("meta"):
        state = s3tokenizer.S3TokenizerV2(MODEL_NAME).state_dict()
    return {name: layer_weight(seed, f"tokenizer.{name}", tuple(value.shape)) for name, value in state.items()}


def write_tokenizer(path: Path, seed: int) -> int:
    """Write the file that ``s3tokenizer.load_model`` reads; returns the number of weights.

    The graph carries names and weights only and is not meant to run: the loader walks nodes and initializers.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = tokenizer_weights(seed)
    nodes: list[onnx.NodeProto] = []
    initializers: list[onnx.TensorProto] = []
    placed: set[str] = set()

    def initializer(name: str, *, transpose: bool = False) -> str:
        placed.add(name)
        stored = _NAMED_INITIALIZERS.get(name, name)
        value = weights[name].T if transpose else weights[name]
        initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), stored))
        return stored

    def node(operator: str, name: str, *inputs: str) -> None:
        previous = nodes[-1].output[0] if nodes else "mel"
        nodes.append(helper.make_node(operator, [previous, *inputs], [f"value_{len(nodes)}"], name=name))

    for conv in ("conv1", "conv2"):
        node("Conv", f"/{conv}/Conv", initializer(f"encoder.{conv}.weight"), initializer(f"encoder.{conv}.bias"))
    blocks = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.blocks."))
    for block in range(blocks):
        module = f"encoder.blocks.{block}"
        for norm in ("attn_ln", "mlp_ln"):
            scale, shift = initializer(f"{module}.{norm}.weight"), initializer(f"{module}.{norm}.bias")
            node("LayerNormalization", f"/blocks.{block}/{norm}/LayerNormalization", scale, shift)
        linears = [(f"attn/{name}", f"attn.{name}") for name in ("query", "key", "value", "out")]
        linears += [(f"mlp/mlp.{index}", f"mlp.{index}") for index in (0, 2)]
        for scope, name in linears:
            node("MatMul", f"/blocks.{block}/{scope}/MatMul", initializer(f"{module}.{name}.weight", transpose=True))
            if f"{module}.{name}.bias" in weights:
                node("Add", f"/blocks.{block}/{scope}/Add", initializer(f"{module}.{name}.bias"))
        node("Conv", f"/blocks.{block}/attn/fsmn_block/Conv", initializer(f"{module}.attn.fsmn_block.weight"))
    down = "quantizer._codebook.project_down"
    node("MatMul", "/quantizer/project_in/MatMul", initializer(f"{down}.weight", transpose=True))
    node("Add", "/quantizer/project_in/Add", initializer(f"{down}.bias"))
    if placed != set(weights):
        raise RuntimeError(f"this s3tokenizer has weights that no known node carries: {sorted(set(weights) - placed)}")

    graph = helper.make_graph(
        nodes,
        MODEL_NAME,
        [helper.make_tensor_value_info("mel", TensorProto.FLOAT, [1, 128, "frames"])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        initializer=initializers,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    return sum(value.size for value in weights.values())
