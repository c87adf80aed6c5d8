# SPDX-License-Identifier: Apache-2.0
"""The gate a torch CAM++ passes before it replaces the shipped ``campplus.onnx``."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from omni_speech_accel.campplus.network import CampplusNet
from omni_speech_accel.campplus.onnx_graph import CampplusFormatError, parse_onnx
from omni_speech_accel.campplus.onnx_weights import EMBEDDING_SIZE, read_campplus_weights
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank
from omni_speech_accel.tolerance import DeviceTolerances, Tolerance

# Frames (10 ms hop): shorter than one mask segment; exactly one segment (100 frames after the stride-2 layer); an odd
# count over two segments; a 6 s reference as MiniCPM-o folds them; one that ends just past a segment border.
PARITY_LENGTHS = (97, 200, 345, 598, 805)


@dataclass(frozen=True)
class LengthParity:
    """What one input length showed."""

    frames: int
    relative_error: float
    cosine: float
    max_abs: float


@dataclass(frozen=True)
class ParityReport:
    """Differences between a torch CAM++ and its ``campplus.onnx`` on onnxruntime's CPU provider."""

    lengths: tuple[LengthParity, ...]
    tolerance: Tolerance
    # Tensors of a CampplusNet that are not, bit for bit, what the file gives. One channel of one layer can be wrong
    # and leave these inputs' embeddings within the tolerance: a unit of a mask that speech never wakes, for instance.
    altered: tuple[str, ...] = ()

    @property
    def worst(self) -> LengthParity:
        """The length with the largest relative error; a NaN counts as largest."""
        return max(self.lengths, key=lambda row: np.inf if np.isnan(row.relative_error) else row.relative_error)

    @property
    def passed(self) -> bool:
        """No tensor altered, and all lengths finite and within the tolerance."""
        return not self.altered and all(self.tolerance.allows(row.relative_error, row.cosine) for row in self.lengths)


class CampplusParityError(RuntimeError):
    """A torch CAM++ differs from its ``campplus.onnx`` by more than rounding. ``report`` has the numbers."""

    def __init__(self, report: ParityReport, onnx_path: str | Path) -> None:
        worst, allowed = report.worst, report.tolerance
        altered = f"; altered tensors: {', '.join(report.altered[:4])}" if report.altered else ""
        if len(report.altered) > 4:
            altered += f" and {len(report.altered) - 4} more"
        super().__init__(
            f"CAM++ differs from {onnx_path} at {worst.frames} frames: relative L2 error {worst.relative_error:.2e} "
            f"and cosine {worst.cosine:.9f}, allowed is {allowed}{altered}"
        )
        self.report = report


def altered_tensors(model: CampplusNet, onnx_path: str | Path) -> tuple[str, ...]:
    """Names of the tensors of ``model`` that are not bit-equal to what ``onnx_path`` gives."""
    expected = CampplusNet(read_campplus_weights(parse_onnx(onnx_path))).state_dict()
    actual = model.state_dict()
    names = sorted(expected.keys() | actual.keys())
    return tuple(
        name
        for name in names
        if name not in expected or name not in actual or not torch.equal(actual[name].cpu(), expected[name])
    )


def measure_parity(
    model: nn.Module,
    onnx_path: str | Path,
    tolerances: DeviceTolerances,
    lengths: tuple[int, ...] = PARITY_LENGTHS,
) -> ParityReport:
    """Run ``model`` (``[B, T, 80]`` to ``[B, 192]``, on its own device) and the ONNX file on the same inputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(onnx_path), sess_options=options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    device = _device_of(model)
    rows = []
    for frames in lengths:
        feat = speech_like_fbank(frames)[None]
        answer = session.run(None, {name: feat})[0]
        if answer.size != EMBEDDING_SIZE:
            raise CampplusFormatError(f"{onnx_path}: an embedding of shape {answer.shape}")
        expected = np.asarray(answer, dtype=np.float64).ravel()
        with torch.inference_mode():
            actual = model(torch.from_numpy(feat).to(device)).cpu().numpy().astype(np.float64).ravel()
        scale = float(np.linalg.norm(expected))
        rows.append(
            LengthParity(
                frames=frames,
                relative_error=float(np.linalg.norm(actual - expected)) / scale,
                cosine=float(actual @ expected) / (float(np.linalg.norm(actual)) * scale),
                max_abs=float(np.abs(actual - expected).max()),
            )
        )
    altered = altered_tensors(model, onnx_path) if isinstance(model, CampplusNet) else ()
    return ParityReport(tuple(rows), tolerances.on(device.type), altered)


def check_parity(
    model: nn.Module,
    onnx_path: str | Path,
    tolerances: DeviceTolerances,
    lengths: tuple[int, ...] = PARITY_LENGTHS,
) -> ParityReport:
    """:func:`measure_parity`, raising :class:`CampplusParityError` outside the tolerance of the model's device.

    Where the device cannot meet the full tolerance, a copy on the CPU is held to it first.
    """
    if tolerances.on(_device_of(model).type) != tolerances.full:
        check_parity(copy.deepcopy(model).to("cpu"), onnx_path, tolerances, lengths)
    report = measure_parity(model, onnx_path, tolerances, lengths)
    if not report.passed:
        raise CampplusParityError(report, onnx_path)
    return report


def _device_of(model: nn.Module) -> torch.device:
    device: torch.device = next(iter(model.state_dict().values())).device
    return device
