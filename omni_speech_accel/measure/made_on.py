# SPDX-License-Identifier: Apache-2.0
"""What numbers were made on and by, for the record that is kept beside them."""

from __future__ import annotations

import platform as python_platform
import subprocess
from collections.abc import Sequence
from pathlib import Path


def command_line(arguments: Sequence[str]) -> str:
    """The command as it was typed, the shell's quotes left out."""
    return " ".join(["omni-speech-accel", *arguments])


def commit() -> str | None:
    """The commit of the package's own checkout; ``None`` where it is installed, not checked out."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def device_name(platform: str) -> str:
    """What the vendor calls the device; on a CPU its architecture."""
    import torch

    if platform == "cpu":
        return python_platform.processor() or python_platform.machine()
    return str(torch.get_device_module(platform).get_device_name())
