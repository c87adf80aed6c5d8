# SPDX-License-Identifier: Apache-2.0
"""What the commands do between their arguments and their report: model, device, progress."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_speech_accel.measure.bench import Arm, BenchReport, Workload, run
from omni_speech_accel.measure.driver import ready_platform
from omni_speech_accel.measure.report_files import write_all
from omni_speech_accel.measure.stage_profile import stage_profile
from omni_speech_accel.measure.verify import ItemResult, VerifyReport, select_items, verify
from omni_speech_accel.measure.workbench import Workbench
from omni_speech_accel.synthetic.bench_references import reference_files

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["model_directory", "run_bench", "run_verify"]

Choose = Callable[[str], Sequence[Arm]]


@contextmanager
def model_directory(console: Console, model: Path | None, size: str) -> Iterator[Path]:
    """The user's model directory, or a random-weight one that is removed afterwards. ``size``: small or full."""
    if model is not None:
        yield model
        return
    from omni_speech_accel.synthetic import write_checkpoint

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
            console.print(f"{result.item}: {result.status} ({result.seconds:.0f} s)", highlight=False)

        bench = Workbench(
            directory,
            platform,
            stage_profile(platform, extra),
            tuple(reference_files(Path(scratch), quick=quick)),
            line.update,
        )
        return verify(bench, patches, asked=bool(items), finished=finished)


# Streams, chunks and measured passes that a run can afford: the CPU's two cores take a second per stream and chunk.
_CPU = Workload(streams=2, chunks=3, repeats=3)
_ACCELERATOR = Workload(streams=8, chunks=5, repeats=5)


def _workload(platform: str, streams: int | None, repeats: int | None, chunks: int | None, quick: bool) -> Workload:
    base = _CPU if platform == "cpu" else _ACCELERATOR
    return Workload(
        streams=streams or (2 if quick else base.streams),
        chunks=chunks or (3 if quick else base.chunks),
        repeats=repeats or (1 if quick else base.repeats),
    )


def run_bench(
    console: Console,
    choose: Choose,
    *,
    model: Path | None = None,
    device: str = "auto",
    size: str | None = None,
    streams: int | None = None,
    repeats: int | None = None,
    chunks: int | None = None,
    quick: bool = False,
    extra: Mapping[str, Any] | None = None,
    out: Path | None = None,
) -> tuple[BenchReport, list[str]]:
    """Everything `bench` and `ab` do before they print their report; also the names of the files written.

    Args:
        choose: The arms for a device type.

    Raises:
        BenchError: No such device here, no usable model, an item that cannot be measured, or a reference mix-up.
        SettingsError: An arm's block is wrong.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with console.status("importing vllm-omni"):
        platform = ready_platform(device)
    arms = choose(platform)
    workload = _workload(platform, streams, repeats, chunks, quick)
    size = size or ("small" if platform == "cpu" else "full")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        model_directory(console, model, size) as directory,
        tempfile.TemporaryDirectory(prefix="omni-speech-accel-") as scratch,
        Progress(*columns, console=console) as bar,
    ):
        task = bar.add_task("bench", total=None)

        started = time.monotonic()

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            # A log has no bar; a line per arm tells it where the minutes went.
            if not console.is_terminal and what.startswith("building "):
                console.print(f"{time.monotonic() - started:5.0f} s  {what} ({done} of {total})", highlight=False)

        profile = stage_profile(platform, extra)
        report, waveforms = run(arms, directory, profile, workload, platform, Path(scratch), progress=progress)
        progress("done", 1, 1)
    return report, write_all(out, report, waveforms) if out is not None else []
