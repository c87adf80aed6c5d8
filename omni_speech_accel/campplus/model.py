# SPDX-License-Identifier: Apache-2.0
"""A torch CAM++ for any device, from the ``campplus.onnx`` that a speech model ships, proven equal to it before use."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from omni_speech_accel.campplus.network import CampplusNet
from omni_speech_accel.campplus.onnx_weights import CampplusFormatError, parse_onnx, read_campplus_weights
from omni_speech_accel.campplus.parity import (
    CampplusParityError,
    LengthParity,
    ParityReport,
    check_parity,
    measure_parity,
)
from omni_speech_accel.runtime import upload

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

    @torch.inference_mode()
    def __call__(self, feat: Tensor) -> Tensor:
        """Mean-normalised log-mel fbank ``[T, 80]`` (10 ms hop), any device, to ``[1, 192]`` float32 on ``device``.

        Raises ``ValueError`` on another shape.
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


_Key = tuple[str, str]
_Stamp = tuple[int, int]
_lock = threading.Lock()
_loaded: dict[_Key, tuple[_Stamp, Campplus]] = {}


def load_campplus(onnx_path: str | Path, device: str | torch.device) -> Campplus:
    """The process's one CAM++ for this file and device, gated by :func:`check_parity` when it is first built.

    Replicas of a stage share it. The key is the absolute path with its modification time and size, and the device with
    its index, so a replaced file is read anew and two cards never share weights. Safe to call from several threads.

    Raises :class:`CampplusFormatError`, :class:`CampplusParityError`, ``FileNotFoundError``; nothing is cached then.
    """
    path = os.path.abspath(onnx_path)
    resolved = _with_index(device)
    with _lock:
        stat = os.stat(path)
        stamp = (stat.st_mtime_ns, stat.st_size)
        key = (path, str(resolved))
        entry = _loaded.get(key)
        if entry is not None and entry[0] == stamp:
            return entry[1]
        campplus = build_campplus(path, resolved)
        check_parity(campplus.model, path)
        _loaded[key] = (stamp, campplus)
        return campplus


def _with_index(device: str | torch.device) -> torch.device:
    """``cuda`` -> ``cuda:0``: an unindexed device means whichever is current when it is used."""
    return torch.empty(0, device=device).device
