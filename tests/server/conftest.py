# SPDX-License-Identifier: Apache-2.0
"""The small speech model that the server tests serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.speech_server.model_dir import build_model_dir


@pytest.fixture(scope="session")
def speech_model(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A served model directory over the small random-weight checkpoint."""
    return build_model_dir(tmp_path_factory.mktemp("served") / "model", small_checkpoint)
