# SPDX-License-Identifier: Apache-2.0
"""What the commands do between their arguments and their report: model, device, progress."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_speech_accel.bench.driver import ready_platform
from omni_speech_accel.bench.profile import stage_profile
from omni_speech_accel.bench.references import reference_files
from omni_speech_accel.bench.verify import ItemResult, VerifyReport, select_items, verify
from omni_speech_accel.bench.workbench import Workbench

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["model_directory", "run_verify"]


@contextmanager
def model_directory(console: Console, model: Path | None, size: str) -> Iterator[Path]:
    """The user's model directory, or a random-weight one that is removed afterwards. ``size``: small or full."""
    if model is not None:
        yield model
        return
    from omni_speech_accel.checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="omni-speech-accel-") as scratch:
        with console.status(f"writing a random-weight model ({size})"):
            directory = Path(scratch) / "model"
            write_checkpoint(directory, size="full" if size == "full" else "small")
        yield directory


def run_verify(
    console: Console,
    *,
    model: Path | None = None,
    items: Sequence[str] = (),
    device: str = "auto",
    size: str = "small",
    quick: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Everything `omni-speech-accel verify` does before it prints its report.

    Raises:
        BenchError: An unknown item, no such device here, or no usable model.
    """
    patches = select_items(items)
    with console.status("importing vllm-omni"):
        platform = ready_platform(device)
    with (
        model_directory(console, model, size) as directory,
        tempfile.TemporaryDirectory(prefix="omni-speech-accel-") as scratch,
        console.status("verify") as line,
    ):

        def finished(result: ItemResult) -> None:
            console.print(f"{result.item}: {result.status}", highlight=False)

        bench = Workbench(
            directory,
            platform,
            stage_profile(platform, extra),
            tuple(reference_files(Path(scratch), quick=quick)),
            line.update,
        )
        return verify(bench, patches, asked=bool(items), finished=finished)
