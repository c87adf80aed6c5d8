# SPDX-License-Identifier: Apache-2.0
"""An ONNX file as a flow of data: constants computed, views seen through, whoever wrote the file.

Names of nodes and tensors say which exporter wrote them, not what they do: TorchScript gives module paths, dynamo and
optimisers give numbers or nothing. What feeds what is the same in all of them. A file is bounded before it is read (its
bytes, its nodes, what its constants grow to, no nested graphs), because it may come from anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# CAM++ has 7 million weights: 28 MB, at most 3,000 nodes, and no tensor of over 524,288 elements.
_MAX_BYTES = 256 * 2**20
_MAX_NODES = 50_000
_MAX_ELEMENTS = 2**22
_MAX_COMPUTED = 2**26
# More than a dense block of CAM++ joins (one and its 24 layers).
_MAX_JOINED = 64

# Operators of a constant sub-graph that are computed here, by onnx's own reference implementation.
_COMPUTED = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "Div",
        "Expand",
        "Identity",
        "Mul",
        "Neg",
        "Pow",
        "Reciprocal",
        "Reshape",
        "Slice",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Transpose",
        "Unsqueeze",
    }
)
# What changes the shape or the repetition of data and not its values.
_VIEWS = frozenset(
    {
        "Cast",
        "Dropout",
        "Expand",
        "Flatten",
        "Identity",
        "Reshape",
        "Slice",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)


class CampplusFormatError(ValueError):
    """The file is not a CAM++ export that this package knows how to read."""


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of a node as Python values."""
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _stored(model: Any) -> Iterator[Any]:
    """Every tensor that the file holds."""
    yield from model.graph.initializer
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t


def _bare(path: str | Path) -> Any:
    """The parsed file without its external data, within bounds."""
    import onnx

    size = Path(path).stat().st_size
    if size > _MAX_BYTES:
        raise CampplusFormatError(f"{path}: {size} bytes, more than any CAM++ has")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CampplusFormatError(f"{path}: not an ONNX model ({error})") from error
    if not model.graph.node:
        raise CampplusFormatError(f"{path}: not an ONNX model (no nodes)")
    if len(model.graph.node) > _MAX_NODES:
        raise CampplusFormatError(f"{path}: {len(model.graph.node)} nodes, more than any CAM++ has")
    for node in model.graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise CampplusFormatError(f"{path}: {node.op_type} node {node.name!r} has a graph of its own")
    return model


def _external(model: Any, path: str | Path) -> list[tuple[Path, Any]]:
    """File and place of every tensor that is stored outside ``path``."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    folder = Path(path).parent
    places = [ExternalDataInfo(tensor) for tensor in _stored(model) if uses_external_data(tensor)]
    return [(folder / place.location, place) for place in places]


def data_files(path: str | Path) -> tuple[Path, ...]:
    """The ONNX file and the files of its external data: what a loaded model was made of."""
    return (Path(path), *sorted({file for file, _ in _external(_bare(path), path)}))


def parse_onnx(path: str | Path) -> Any:
    """The file as an ``onnx.ModelProto``, its external data read.

    Raises :class:`CampplusFormatError` for a file that is no ONNX model or too large for a CAM++; ``FileNotFoundError``
    passes through.
    """
    from onnx.external_data_helper import load_external_data_for_model

    model = _bare(path)
    # A tensor without a length takes the rest of its file.
    places = _external(model, path)
    total = sum(place.length or file.stat().st_size - (place.offset or 0) for file, place in places)
    if total > _MAX_BYTES:
        raise CampplusFormatError(f"{path}: {total} bytes of external data, more than any CAM++ has")
    try:
        load_external_data_for_model(model, str(Path(path).parent))
    except Exception as error:
        raise CampplusFormatError(f"{path}: external data cannot be read ({error})") from error
    return model


class Graph:
    """Which node takes which data. A value is known by the name that it had before any view was taken of it.

    ``users`` has the nodes that take a value, in the file's order; ``joined`` the value that concatenates others.
    """

    def __init__(self, model: Any) -> None:
        """Raises :class:`CampplusFormatError` where the graph is no flow from one input to an output."""
        from onnx import numpy_helper

        self._model = model
        self._constants: dict[str, npt.NDArray[Any]] = {}
        # Values of neither kind: shapes of data and what is computed of them, and constants of an unknown operator.
        self._aside: dict[str, str] = {}
        self._origin: dict[str, str] = {}
        self._pieces: dict[str, tuple[str, ...]] = {}
        self._computed = 0
        self.users: dict[str, list[Any]] = {}
        self.joined: dict[tuple[str, ...], str] = {}
        graph = model.graph
        try:
            for tensor in graph.initializer:
                self._constants[tensor.name] = numpy_helper.to_array(tensor)
        except Exception as error:
            raise CampplusFormatError(f"tensor {tensor.name!r} cannot be read ({error})") from error
        inputs = [value.name for value in graph.input if value.name not in self._constants]
        if len(inputs) != 1 or not graph.output:
            raise CampplusFormatError(f"expected one input and an output, found {len(inputs)} and {len(graph.output)}")
        self.input = inputs[0]
        self._origin[self.input] = self.input
        for node in graph.node:
            self._add(node)
        self.output = self.origin(graph.output[0].name)

    def origin(self, name: str) -> str:
        """The name of a value before the views."""
        return self._origin.get(name, name)

    def tensor(self, name: str) -> Array | str:
        """A constant in float64, or why there is none."""
        if name not in self._constants:
            return f"computed by {self._aside[name]}" if name in self._aside else "no constant"
        try:
            return np.asarray(self._constants[name], dtype=np.float64)
        except (TypeError, ValueError):
            return "no number"

    def is_weight(self, name: str) -> bool:
        """Whether this is a constant that was learned: floats, and more than one."""
        value = self._constants.get(name)
        return value is not None and value.size > 1 and value.dtype.kind not in "iub"

    def data(self, node: Any) -> list[str]:
        """The data that a node takes, in order; its constants left out."""
        return [self._origin[name] for name in node.input if name in self._origin]

    def _add(self, node: Any) -> None:
        inputs = [name for name in node.input if name]
        for name in inputs:
            if name not in self._constants and name not in self._aside and name not in self._origin:
                raise CampplusFormatError(f"{describe(node)} takes {name!r}, which nothing before it gives")
        for name in filter(None, node.output):
            if name in self._constants or name in self._aside or name in self._origin:
                raise CampplusFormatError(f"{describe(node)} gives {name!r}, which is there already")
        data = self.data(node)
        if node.op_type in ("Shape", "Size") or not data:
            value = None if any(name in self._aside for name in inputs) or data else self._compute(node, inputs)
            for name in node.output:
                if value is None:
                    self._aside[name] = describe(node)
                else:
                    self._constants[name] = value
            return
        for name in node.output:
            self._origin[name] = name
        if node.op_type in _VIEWS and node.input[0] in self._origin:
            self._origin[node.output[0]] = data[0]
            return
        for name in dict.fromkeys(data):
            self.users.setdefault(name, []).append(node)
        if node.op_type == "Concat" and len(data) == len(inputs):
            flat = (piece for name in data for piece in self._pieces.get(name, (name,)))
            pieces = tuple(itertools.islice(flat, _MAX_JOINED + 1))
            if len(pieces) <= _MAX_JOINED:
                self._pieces[node.output[0]] = pieces
                self._origin[node.output[0]] = self.joined.setdefault(pieces, node.output[0])

    def _compute(self, node: Any, inputs: Sequence[str]) -> npt.NDArray[Any] | None:
        """What a node of constants gives; ``None`` where that is unknown or would grow beyond a weight's size."""
        from onnx import numpy_helper

        if node.op_type == "Constant":
            (value,) = attributes(node).values()
            return numpy_helper.to_array(value) if hasattr(value, "raw_data") else np.asarray(value)
        if node.op_type not in _COMPUTED:
            return None
        values = [self._constants[name] for name in inputs]
        try:
            self._computed += (size := _computed_size(node.op_type, values))
            if size > _MAX_ELEMENTS or self._computed > _MAX_COMPUTED:
                raise CampplusFormatError(f"{describe(node)} makes a constant larger than any weight of CAM++")
            return _run(node, dict(zip(inputs, values, strict=True)), self._model.opset_import)
        except CampplusFormatError:
            raise
        except Exception as error:
            raise CampplusFormatError(f"{describe(node)} cannot be computed ({error})") from error


def describe(node: Any) -> str:
    """``Conv node '/head/conv1/Conv'``."""
    kind = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return f"{kind} node {node.name!r}" if node.name else f"unnamed {kind} node"


def _computed_size(kind: str, values: Sequence[npt.NDArray[Any]]) -> int:
    """An upper bound of the elements that an operator gives, before it is run."""
    if kind == "Expand":
        shape: Iterable[int] = np.broadcast_shapes(values[0].shape, tuple(int(n) for n in values[1].ravel()))
        return math.prod(shape)
    if kind in ("Add", "Div", "Mul", "Pow", "Sub"):
        return math.prod(np.broadcast_shapes(*(value.shape for value in values)))
    return sum(value.size for value in values)


def _run(node: Any, values: dict[str, npt.NDArray[Any]], opsets: Any) -> npt.NDArray[Any]:
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    inputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in values]
    output = helper.make_tensor_value_info(node.output[0], TensorProto.UNDEFINED, None)
    model = helper.make_model(helper.make_graph([node], "constant", inputs, [output]), opset_imports=list(opsets))
    result: npt.NDArray[Any] = np.asarray(ReferenceEvaluator(model).run(None, values)[0])
    return result
