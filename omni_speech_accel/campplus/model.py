# SPDX-License-Identifier: Apache-2.0
"""A torch CAM++ for any device, from the ``campplus.onnx`` that a speech model ships, proven equal to it before use."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from omni_speech_accel.campplus.network import CampplusNet
from omni_speech_accel.campplus.onnx_graph import CampplusFormatError, data_files, parse_onnx
from omni_speech_accel.campplus.onnx_weights import read_campplus_weights
from omni_speech_accel.campplus.parity import (
    CampplusParityError,
    LengthParity,
    ParityReport,
    check_parity,
    measure_parity,
)
from omni_speech_accel.runtime import upload
from omni_speech_accel.tolerance import DeviceTolerances

__all__ = [
    "Campplus",
    "CampplusFormatError",
    "CampplusNet",
    "CampplusParityError",
    "LengthParity",
    "ParityReport",
    "build_campplus",
    "check_parity",
    "load_campplus",
    "measure_parity",
]


class Campplus:
    """CAM++ as a host calls its speaker model: fbank ``[T, 80]`` in, embedding ``[1, 192]`` on ``device`` out.

    ``model`` takes ``[B, T, 80]`` and is what a graph cache captures.
    """

    def __init__(self, model: CampplusNet, device: torch.device) -> None:
        self.model = model.to(device)
        self.device = device

    @torch.no_grad()
    def __call__(self, feat: Tensor) -> Tensor:
        """Mean-normalised log-mel fbank ``[T, 80]`` (10 ms hop), any device, to ``[1, 192]`` float32 on ``device``.

        Under ``no_grad`` and not in inference mode: stock's embedding is an ordinary tensor, which a caller may write
        into or feed to a layer under grad. Raises ``ValueError`` on another shape.
        """
        # Not `.to(device)`: from pageable memory that waits for all that is queued there.
        embedding: Tensor = self.model(upload(feat, self.device).unsqueeze(0))
        return embedding


def build_campplus(onnx_path: str | Path, device: str | torch.device = "cpu") -> Campplus:
    """Read ``onnx_path`` into a new torch CAM++ on ``device``, without the parity gate and without the cache.

    Raises :class:`CampplusFormatError` naming what is missing or unknown, ``FileNotFoundError`` for no file.
    """
    model = CampplusNet(read_campplus_weights(parse_onnx(onnx_path)))
    return Campplus(model, _with_index(device))


_Stamp = tuple[tuple[Path, int, int, int, int], ...]
_Bits = tuple[int, ...]
_lock = threading.Lock()
# Weak: a model is freed with the last stage that uses it, as the host's own weights are.
_loaded: dict[tuple[str, str], tuple[_Stamp, _Bits, weakref.ref[Campplus]]] = {}


def load_campplus(onnx_path: str | Path, device: str | torch.device, tolerances: DeviceTolerances) -> Campplus:
    """The process's one CAM++ for this file and device, gated by :func:`check_parity` when it is first built.

    Replicas of a stage share it. Read anew where the file or its external data was replaced since, and where the
    weights in memory are no longer those that were read: a sleeping engine drops device memory. Safe to call from
    several threads.

    Args:
        tolerances: What the gate allows; ``speaker_device`` hands in its row's.

    Raises:
        CampplusFormatError, CampplusParityError, FileNotFoundError: Nothing is cached then.
    """
    path = os.path.abspath(onnx_path)
    resolved = _with_index(device)
    key = (path, str(resolved))
    with _lock:
        stamp, bits, reference = _loaded.get(key, ((), (), None))
        campplus = reference() if reference is not None else None
        if campplus is not None and stamp == _stamp([file for file, *_ in stamp]) and bits == _bits(campplus):
            return campplus
        stamp = _stamp(data_files(path))
        campplus = build_campplus(path, resolved)
        check_parity(campplus.model, path, tolerances)
        _loaded[key] = (stamp, _bits(campplus), weakref.ref(campplus))
        return campplus


def _stamp(files: Iterable[Path]) -> _Stamp:
    """What changes when one of these files is replaced, its size and times kept included; empty where one is gone."""
    try:
        stats = [(file, file.stat()) for file in files]
    except FileNotFoundError:
        return ()
    return tuple((file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for file, stat in stats)


def _bits(campplus: Campplus) -> _Bits:
    """A checksum of each tensor's bits: 30 ms on a CPU, one transfer from a device."""
    sums = [value.view(torch.int32).sum(dtype=torch.int64) for value in campplus.model.buffers()]
    return tuple(torch.stack(sums).tolist())


def _with_index(device: str | torch.device) -> torch.device:
    """``cuda`` -> ``cuda:0``: an unindexed device means whichever is current when it is used."""
    return torch.empty(0, device=device).device
