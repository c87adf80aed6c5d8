# SPDX-License-Identifier: Apache-2.0
"""What every command does with the folder that it leaves results in, and with an error that ends it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import typer

__all__ = ["fail", "ready_folder"]


def fail(message: str, as_json: bool, code: int) -> typer.Exit:
    """Say what is wrong: on stderr for people, and with ``--json`` as the one document on stdout too."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    if as_json:
        typer.echo(json.dumps({"error": message, "exit_code": code}, indent=2))
    return typer.Exit(code)


def ready_folder(folder: Path | None) -> None:
    """Make the folder, and a file in it, now: a long run must not end in a place that cannot be written.

    Raises:
        OSError: It cannot be made or written.
        ValueError: The path holds a null byte.
    """
    if folder is not None:
        for path in (folder, *folder.parents):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(f"{path} is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
