# SPDX-License-Identifier: Apache-2.0
"""The small speech model that the server tests serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.speech_server.model_dir import build_model_dir, ensure_checkpoint

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def speech_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A served model directory over a small random-weight checkpoint; its weights stay in .cache between runs."""
    checkpoint = ensure_checkpoint(REPO / ".cache" / "models" / "small", size="small")
    return build_model_dir(tmp_path_factory.mktemp("served") / "model", checkpoint)
