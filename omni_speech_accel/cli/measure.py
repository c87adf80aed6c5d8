# SPDX-License-Identifier: Apache-2.0
"""The ``verify``, ``bench`` and ``ab`` commands: model, device and progress between arguments and report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from omni_speech_accel.cli.options import (
    BenchOut,
    BenchSize,
    Chunks,
    Device,
    Extra,
    Json,
    Model,
    ModelSize,
    Overwrite,
    PlatformName,
    Quick,
    Repeats,
    Size,
    Streams,
    extras_in,
    names_in,
    yaml_value,
)
from omni_speech_accel.cli.output import FAILED, OK, errors_reported, ready_folder, stdout_kept_clean, stops_early
from omni_speech_accel.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from omni_speech_accel.measure.bench import Arm, BenchReport
    from omni_speech_accel.measure.verify import ItemResult, VerifyReport

_VERIFY_JSON = "verify.json"


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
        UserError: An unknown item, no such device here, or no usable model.
    """
    from omni_speech_accel.measure import verify as module
    from omni_speech_accel.measure.driver import ready_platform
    from omni_speech_accel.measure.stage_profile import stage_profile
    from omni_speech_accel.measure.workbench import Workbench
    from omni_speech_accel.synthetic.references import reference_files

    patches = module.select_items(items)
    with console.status("importing vllm-omni"):
        platform = ready_platform(device)
    with (
        model_directory(console, model, size) as directory,
        tempfile.TemporaryDirectory(prefix="omni-speech-accel-") as scratch,
        console.status("verify") as line,
    ):

        def finished(result: ItemResult) -> None:
            console.print(f"{result.item}: {result.status} ({result.seconds:.0f} s)", highlight=False)

        workbench = Workbench(
            directory,
            platform,
            stage_profile(platform, extra),
            tuple(reference_files(Path(scratch), quick=quick)),
            line.update,
        )
        return module.verify(workbench, patches, asked=bool(items), finished=finished)


def run_bench(
    console: Console,
    choose: Callable[[str], Sequence[Arm]],
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
        UserError: No such device here, no usable model, or an item that cannot be measured.
        RunError: What was measured is not what was asked for.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from omni_speech_accel.measure.bench import run
    from omni_speech_accel.measure.driver import ready_platform
    from omni_speech_accel.measure.report_files import write_all
    from omni_speech_accel.measure.stage_profile import stage_profile
    from omni_speech_accel.measure.workload import Workload

    with console.status("importing vllm-omni"):
        platform = ready_platform(device)
    arms = choose(platform)
    # What a run can afford: the CPU's two cores take a second per stream and chunk.
    cpu = platform == "cpu"
    base = Workload(streams=2, chunks=3, repeats=3) if cpu else Workload(streams=8, chunks=5, repeats=5)
    workload = Workload(
        streams=streams or (2 if quick else base.streams),
        chunks=chunks or (3 if quick else base.chunks),
        repeats=repeats or (1 if quick else base.repeats),
    )
    size = size or ("small" if cpu else "full")
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


def verify(
    model: Model = None,
    items: Annotated[
        str | None,
        typer.Option(help="Items to check, comma separated; one that cannot be checked here then fails. Default: all."),
    ] = None,
    device: Device = PlatformName.auto,
    size: Size = ModelSize.small,
    quick: Annotated[bool, typer.Option(help="Four references instead of ten.")] = False,
    extra: Extra = None,
    out: Annotated[Path | None, typer.Option(help="Folder for verify.json with every comparison.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Each item on, against stock, on the same input, on the device that is here.

    Prompt features are compared over references of 1 to 31 seconds at several rates and formats, the talker's stop
    censoring over the states of a stream, decoding over streams of different voices with late joiners and short ends:
    largest absolute, relative (L2) and cosine difference and differing tokens, against each item's stated tolerance.
    An item that needs another device is "not run", never "passed".

    Exit code: 0 nothing differs by more than stated; 1 an item failed, or one named by --items could not be checked;
    2 wrong usage, or something is missing here; 130 interrupted before there was anything to report.

    Examples:

        omni-speech-accel verify

        omni-speech-accel verify --model /models/MiniCPM-o-4_5 --items sync_free_prompt,speaker_device --json
    """
    with errors_reported(as_json), stops_early(), stdout_kept_clean() as console:
        ready_folder(out, holds=_VERIFY_JSON, overwrite=overwrite)
        report = run_verify(
            console,
            model=model,
            items=names_in(items),
            device=device.value,
            size=size.value,
            quick=quick,
            extra=extras_in(extra),
        )
        if out is not None:
            (out / _VERIFY_JSON).write_text(report.as_json(every_comparison=True) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(report.as_json())
    else:
        from omni_speech_accel.cli.tables import print_verify

        print_verify(report)
    raise typer.Exit(OK if report.ok else FAILED)


def _report_bench(report: BenchReport, files: list[str], out: Path | None, as_json: bool) -> NoReturn:
    from omni_speech_accel.measure.report_files import PLOT_HINT

    if as_json:
        typer.echo(report.as_json())
    else:
        from omni_speech_accel.cli.tables import print_bench

        print_bench(report)
        if out is not None:
            typer.echo(f"\n{out}: {', '.join(name for name in files if name != PLOT_HINT)}")
    if PLOT_HINT in files:
        typer.echo(PLOT_HINT, err=as_json)
    raise typer.Exit(OK if report.ok else FAILED)


def _compare(
    prepare: Callable[[], Callable[[str], Sequence[Arm]]],
    *,
    device: PlatformName,
    size: ModelSize | None,
    extra: list[str] | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    **settings: Any,
) -> NoReturn:
    """What `bench` and `ab` share: run, print, exit.

    Args:
        prepare: Checks the arguments, before any work, and returns the arms for a device type.
        settings: Further arguments of :func:`run_bench`.
    """
    from omni_speech_accel.measure.report_files import BENCH_JSON

    with errors_reported(as_json), stops_early(), stdout_kept_clean() as console:
        choose = prepare()
        ready_folder(out, holds=BENCH_JSON, overwrite=overwrite)
        report, files = run_bench(
            console,
            choose,
            device=device.value,
            size=size.value if size is not None else None,
            extra=extras_in(extra),
            out=out,
            **settings,
        )
    _report_bench(report, files, out, as_json)


def bench(
    model: Model = None,
    items: Annotated[
        str | None, typer.Option(help="Items to measure, comma separated. Default: all that act on this device.")
    ] = None,
    streams: Streams = None,
    repeats: Repeats = None,
    chunks: Chunks = None,
    quick: Quick = False,
    device: Device = PlatformName.auto,
    size: BenchSize = None,
    extra: Extra = None,
    out: BenchOut = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Time the speech stage: stock, each item alone, and all of them, in one run.

    Drives the stock stage-2 model with the profile that the host ships for this device (a small one on CPU). Streams
    speak real speech in voices that are new in every pass. Arms take turns in A B B A order after a warm-up and one
    discarded pass; each number is a median with least and most, and a ratio to stock of the same run. Checked on the
    way: each stream used the reference that it was given, and all arms made the same amount of audio.

    Exit code: 0 measured; 1 the arms are not comparable, or the run broke (a stream used another reference);
    2 wrong usage, or something is missing here; 130 interrupted before there was anything to report.

    Examples:

        omni-speech-accel bench --out results

        omni-speech-accel bench --model /models/MiniCPM-o-4_5 --items cold_reference_batch --streams 8 --out results
    """
    settings = {name: value for name, value in locals().items() if name != "items"}
    names = names_in(items)

    def prepare() -> Callable[[str], Sequence[Arm]]:
        from omni_speech_accel.measure.bench import item_arms
        from omni_speech_accel.measure.verify import select_items

        select_items(names)
        return lambda platform: item_arms(names, platform)

    _compare(prepare, **settings)


def _block(text: str, option: str) -> Any:
    """A settings block from YAML text or ``@FILE``; ``stock`` is no block.

    Raises:
        UsageError: It is no YAML, or a file that cannot be read.
        SettingsError: It is no valid block.
    """
    from omni_speech_accel.plugin.settings import parse_block

    if text.strip() == "stock":
        return None
    try:
        source = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: {error}") from error
    block = yaml_value(source, option)
    parse_block(block, option)
    return block


def ab(
    a: Annotated[str, typer.Option("--a", help="Settings block of arm A: YAML text, @FILE, or stock.")],
    b: Annotated[str, typer.Option("--b", help="Settings block of arm B.")],
    model: Model = None,
    streams: Streams = None,
    repeats: Repeats = None,
    chunks: Chunks = None,
    quick: Quick = False,
    device: Device = PlatformName.auto,
    size: BenchSize = None,
    extra: Extra = None,
    out: BenchOut = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """`bench` of two settings blocks of your choice, A against B.

    A block is what stands under omni_speech_accel in a deploy YAML; items that it does not name take their defaults.

    Exit code: 0 measured; 1 the arms are not comparable, or the run broke (a stream used another reference);
    2 wrong usage, or something is missing here; 130 interrupted before there was anything to report.

    Examples:

        omni-speech-accel ab --a stock --b true

        omni-speech-accel ab --a '{s3_graph: {max_graphs: 2}}' --b '{s3_graph: {max_graphs: 8}}' --out results
    """
    settings = {name: value for name, value in locals().items() if name not in ("a", "b")}

    def prepare() -> Callable[[str], Sequence[Arm]]:
        from omni_speech_accel.measure.bench import Arm

        arms = [Arm("A", _block(a, "--a")), Arm("B", _block(b, "--b"))]
        return lambda platform: arms

    _compare(prepare, **settings)
