# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.export_trained WEIGHTS FOLDER``: the trained CAM++ as the exporters of this torch write it.

A process of its own: the dynamo exporter needs packages that no host has, which the caller puts on the path.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from pathlib import Path

import onnx
import torch
from vllm_omni.model_executor.models.indextts2.utils.campplus.dtdnn import CAMPPlus

AXES = {"input": {0: "B", 1: "T"}, "output": {0: "B"}}


def main(weights: Path, folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    network = CAMPPlus(feat_dim=80, embedding_size=192).float().eval()
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True), strict=True)

    def export(name: str, **options: object) -> Path:
        path = folder / f"{name}.onnx"
        inputs = (torch.zeros(1, 200, 80),)
        torch.onnx.export(network, inputs, str(path), input_names=["input"], output_names=["output"], **options)
        return path

    for opset in (11, 13, 17):
        export(f"folded-{opset}", dynamo=False, opset_version=opset, dynamic_axes=AXES)
    export("unfolded-13", dynamo=False, opset_version=13, do_constant_folding=False, dynamic_axes=AXES)
    unnamed = onnx.load(str(folder / "folded-13.onnx"))
    for node in unnamed.graph.node:
        node.name = ""
    onnx.save(unnamed, str(folder / "unnamed.onnx"))
    if importlib.util.find_spec("onnxscript"):
        free = torch.export.Dim.DYNAMIC
        export(
            "dynamo-18", dynamo=True, opset_version=18, dynamic_shapes={"x": {0: free, 1: free}}, external_data=False
        )
    if importlib.util.find_spec("onnxslim"):
        import onnxslim

        onnx.save(onnxslim.slim(onnx.load(str(folder / "unfolded-13.onnx"))), str(folder / "slim.onnx"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
