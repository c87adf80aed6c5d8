# SPDX-License-Identifier: Apache-2.0
"""The folder that a long run of the command line leaves its results in."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["ready_folder"]


def ready_folder(folder: Path | None) -> None:
    """Make the folder, and a file in it, now: a long run must not end in a place that cannot be written.

    Raises:
        OSError: It cannot be made or written.
        ValueError: The path holds a null byte.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
