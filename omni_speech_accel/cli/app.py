# SPDX-License-Identifier: Apache-2.0
"""The ``omni-speech-accel`` command.

Only typer is imported here: `--help` answers at once, `status` within a second,
and what needs torch or the host is imported by the command that needs it.
With `--json` a command prints one JSON document on stdout and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from omni_speech_accel import __version__
from omni_speech_accel.cli.output import fail, ready_folder
from omni_speech_accel.transitions.command import register as register_transitions

if TYPE_CHECKING:
    from rich.console import Console

    from omni_speech_accel.deploy.profiles import Profile
    from omni_speech_accel.measure.bench import BenchReport

__all__ = ["app", "main"]

OK, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
READER_GONE = 141  # what a shell shows of a command that SIGPIPE ended
_UsageError: Any = typer.BadParameter.__base__
"""Every mistake that typer finds itself; typer brings its own copy of click, or uses the installed one."""


class _Commands(TyperGroup):
    """The commands; with ``--json`` among the arguments, what typer refuses is a document too."""

    @contextlib.contextmanager
    def _refusals_reported(self, arguments: list[str]) -> Iterator[None]:
        try:
            yield
        except _UsageError as error:
            if "--json" in arguments:
                typer.echo(json.dumps({"error": error.format_message(), "exit_code": error.exit_code}, indent=2))
            raise  # typer says it on stderr

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """A context that keeps the arguments, which parsing uses up."""
        arguments = list(args)
        with self._refusals_reported(arguments):
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta[__name__] = arguments
        return context

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with self._refusals_reported(ctx.meta[__name__]):
            return super().invoke(ctx)


app = typer.Typer(
    name="omni-speech-accel",
    cls=_Commands,
    help="Faster speech from stock vllm-omni: see what applies here, prove it, measure it, write its deploy YAML.",
    epilog="Start with `omni-speech-accel status`. Every command takes --help and, for machines, --json.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class PlatformName(str, Enum):
    """Devices that the host knows."""

    auto = "auto"
    cuda = "cuda"
    npu = "npu"
    cpu = "cpu"


class ModelSize(str, Enum):
    """Sizes of the random-weight model."""

    small = "small"
    full = "full"


class Place(str, Enum):
    """Where the block may stand in a deploy YAML."""

    additional_config = "additional_config"
    connectors = "connectors"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="A MiniCPM-o model directory (holds assets/token2wav). Default: a random-weight one, made and removed.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
Device = Annotated[
    PlatformName,
    typer.Option(help="Device that must be here; auto takes the one vllm-omni runs on in this environment."),
]
Size = Annotated[ModelSize, typer.Option(help="Size of the random-weight model; full has the released model's sizes.")]
Extra = Annotated[
    list[str] | None,
    typer.Option(
        "--extra",
        help="Connector extra of the stage, KEY=VALUE, beside the shipped profile's; may repeat. "
        "Example: --extra token2wav_n_timesteps=10",
        show_default=False,
    ),
]


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def _stdout_fd() -> int | None:
    """The file descriptor behind ``sys.stdout``, where there is one."""
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def _stdout_kept_clean() -> Iterator[Console]:
    """Send what the host logs and prints, from C too, to stderr; yields a console there for progress.

    vLLM logs to stdout, and its imports print: a script that reads this command's stdout must not see either.
    """
    from rich.console import Console

    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    fd = _stdout_fd()
    kept = None if fd is None else os.dup(fd)
    try:
        if fd is not None:
            sys.stdout.flush()
            os.dup2(2, fd)
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield Console(stderr=True)
    finally:
        if fd is not None and kept is not None:
            sys.stdout.flush()
            os.dup2(kept, fd)
            os.close(kept)


@contextlib.contextmanager
def _errors_reported(as_json: bool) -> Iterator[None]:
    """Turn what the user can mend into a message and exit code 2."""
    from omni_speech_accel.errors import BenchError
    from omni_speech_accel.plugin.settings import SettingsError

    try:
        yield
    except (BenchError, SettingsError, OSError) as error:
        raise fail(str(error), as_json, WRONG_INPUT) from error
    except KeyboardInterrupt:
        raise fail("interrupted before there was anything to report", as_json, INTERRUPTED) from None


@contextlib.contextmanager
def _stops_early() -> Iterator[None]:
    """Let SIGTERM, which ``timeout`` and a cancelled job send, end a run as Ctrl-C does: what is done is reported."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: the process's owner decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _names(value: str | None) -> list[str]:
    return [name.strip() for name in (value or "").split(",") if name.strip()]


def _extras(pairs: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs, values read as YAML.

    Raises:
        BenchError: A pair has no ``=``.
        SettingsError: A value is no YAML.
    """
    from omni_speech_accel.errors import BenchError

    found = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise BenchError(f"--extra takes KEY=VALUE, not {pair!r}")
        found[key] = _yaml(value, f"--extra {key}")
    return found


def _yaml(text: str, option: str) -> Any:
    """An option's value.

    Raises:
        SettingsError: It is no YAML.
    """
    import yaml

    from omni_speech_accel.plugin.settings import SettingsError

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{option}: no valid YAML: {error}") from error


def _host_platform() -> Any:
    """The platform that the host reports.

    Raises:
        BenchError: The host cannot be imported.
    """
    from omni_speech_accel.cli.status import detect_platform
    from omni_speech_accel.errors import BenchError

    try:
        return detect_platform()
    except ImportError as error:
        raise BenchError(f"--ask-host: vllm-omni cannot be imported here: {error}") from error


def _not_a_file(path: str | None, error: FileNotFoundError) -> OSError:
    """``error``, or what it hides: that a folder has this path."""
    return IsADirectoryError(f"{path} is a folder") if path is not None and Path(path).is_dir() else error


@app.command()
def status(
    deploy_config: Annotated[
        str | None,
        typer.Option("--deploy-config", help="Deploy YAML to judge: a path, or the name of one that the host ships."),
    ] = None,
    platform: Annotated[
        PlatformName, typer.Option(help="Judge for this device; auto guesses from drivers and installed packages.")
    ] = PlatformName.auto,
    ask_host: Annotated[
        bool,
        typer.Option("--ask-host", help="Import vllm-omni (10 s) and let it name the platform and judge the deploy."),
    ] = False,
    as_json: Json = False,
) -> None:
    """What is installed, what applies here, and what a deploy YAML would switch on.

    Reads files and package metadata only, so it is quick and needs no device. For each item: on, off, available or not
    applied and why, and whether the test-suite runs on this host's code ("verified") or only its shape fits ("by
    capability"). Prints the VLLM_PLUGINS value to use, and what in the environment would get in the way.

    Exit code: 0 everything asked for applies; 1 something asked for cannot be had; 2 the deploy YAML is wrong;
    130 interrupted.

    Examples:

        omni-speech-accel status

        omni-speech-accel status --deploy-config my.yaml --json
    """
    from omni_speech_accel.cli import status as module

    with _errors_reported(as_json):
        chosen = None
        with contextlib.ExitStack() as stack:
            if ask_host or deploy_config is not None:
                stack.enter_context(_stdout_kept_clean())
            if platform is not PlatformName.auto:
                chosen = module.Platform(platform.value, "--platform")
            elif ask_host:
                chosen = _host_platform()
            try:
                found = module.collect(deploy_config, platform=chosen, ask_host=ask_host)
            except FileNotFoundError as error:
                raise _not_a_file(deploy_config, error) from error
    if as_json:
        typer.echo(found.as_json())
    else:
        from omni_speech_accel.cli.tables import print_status

        print_status(found)
    raise typer.Exit(found.exit_code)


@app.command()
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
    as_json: Json = False,
) -> None:
    """Each item on, against stock, on the same input, on the device that is here.

    Prompt features are compared over references of 1 to 31 seconds at several rates and formats, the talker's stop
    censoring over the states of a stream, decoding over streams of different voices with late joiners and short ends:
    largest absolute, relative (L2) and cosine difference and differing tokens, against each item's stated tolerance.
    An item that needs another device is "not run", never "passed".

    Exit code: 0 nothing differs by more than stated; 1 an item failed, or one named by --items could not be checked;
    2 wrong usage; 130 interrupted before there was anything to report.

    Examples:

        omni-speech-accel verify

        omni-speech-accel verify --model /models/MiniCPM-o-4_5 --items sync_free_prompt,speaker_device --json
    """
    with _errors_reported(as_json), _stops_early(), _stdout_kept_clean() as console:
        from omni_speech_accel.cli.measure import run_verify

        ready_folder(out)
        report = run_verify(
            console,
            model=model,
            items=_names(items),
            device=device.value,
            size=size.value,
            quick=quick,
            extra=_extras(extra),
        )
        if out is not None:
            (out / "verify.json").write_text(report.as_json(every_comparison=True) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(report.as_json())
    else:
        from omni_speech_accel.cli.tables import print_verify

        print_verify(report)
    raise typer.Exit(OK if report.ok else FAILED)


BenchOut = Annotated[
    Path | None, typer.Option("--out", help="Folder for bench.json, bench.csv, bench.png and one WAV per arm.")
]
Streams = Annotated[int | None, typer.Option(min=1, help="Streams at once. Default: 8, on CPU 2.", show_default=False)]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Measured passes per arm. Default: 5, on CPU 3.", show_default=False)
]
Chunks = Annotated[
    int | None,
    typer.Option(min=3, help="Payloads per stream, about a second each. Default: 5, on CPU 3.", show_default=False),
]
Quick = Annotated[bool, typer.Option("--quick", help="Two streams, three chunks, one measured pass: a smoke test.")]
BenchSize = Annotated[
    ModelSize | None,
    typer.Option("--size", help="Size of the random-weight model. Default: full, on CPU small.", show_default=False),
]


def _report_bench(report: BenchReport, files: list[str], out: Path | None, as_json: bool) -> None:
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


@app.command()
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
    as_json: Json = False,
) -> None:
    """Time the speech stage: stock, each item alone, and all of them, in one run.

    Drives the stock stage-2 model with the profile that the host ships for this device (a small one on CPU). Streams
    speak real speech in voices that are new in every pass. Arms take turns in A B B A order after a warm-up and one
    discarded pass; each number is a median with least and most, and a ratio to stock of the same run. Checked on the
    way: each stream used the reference that it was given, and all arms made the same amount of audio.

    Exit code: 0 measured; 1 the arms are not comparable; 2 wrong usage, or a stream used another reference;
    130 interrupted before there was anything to report.

    Examples:

        omni-speech-accel bench --out results

        omni-speech-accel bench --model /models/MiniCPM-o-4_5 --items cold_reference_batch --streams 8 --out results
    """
    names = _names(items)
    with _errors_reported(as_json), _stops_early(), _stdout_kept_clean() as console:
        from omni_speech_accel.cli.measure import run_bench
        from omni_speech_accel.measure.bench import item_arms
        from omni_speech_accel.measure.verify import select_items

        select_items(names)
        ready_folder(out)
        report, files = run_bench(
            console,
            lambda platform: item_arms(names, platform),
            model=model,
            device=device.value,
            size=size.value if size is not None else None,
            streams=streams,
            repeats=repeats,
            chunks=chunks,
            quick=quick,
            extra=_extras(extra),
            out=out,
        )
    _report_bench(report, files, out, as_json)


def _block(text: str, option: str) -> Any:
    """A settings block from YAML text or ``@FILE``; ``stock`` is no block.

    Raises:
        SettingsError: It is no YAML, or no valid block.
    """
    from omni_speech_accel.plugin.settings import SettingsError, parse_block

    if text.strip() == "stock":
        return None
    try:
        source = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{option}: {error}") from error
    block = _yaml(source, option)
    parse_block(block, option)
    return block


@app.command()
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
    as_json: Json = False,
) -> None:
    """`bench` of two settings blocks of your choice, A against B.

    A block is what stands under omni_speech_accel in a deploy YAML; items that it does not name take their defaults.

    Exit code: 0 measured; 1 the arms are not comparable; 2 wrong usage, or a stream used another reference;
    130 interrupted before there was anything to report.

    Examples:

        omni-speech-accel ab --a stock --b true

        omni-speech-accel ab --a '{s3_graph: {max_graphs: 2}}' --b '{s3_graph: {max_graphs: 8}}' --out results
    """
    with _errors_reported(as_json), _stops_early(), _stdout_kept_clean() as console:
        from omni_speech_accel.cli.measure import run_bench
        from omni_speech_accel.measure.bench import Arm

        arms = [Arm("A", _block(a, "--a")), Arm("B", _block(b, "--b"))]
        ready_folder(out)
        report, files = run_bench(
            console,
            lambda platform: arms,
            model=model,
            device=device.value,
            size=size.value if size is not None else None,
            streams=streams,
            repeats=repeats,
            chunks=chunks,
            quick=quick,
            extra=_extras(extra),
            out=out,
        )
    _report_bench(report, files, out, as_json)


def _chosen(on: list[str], off: list[str], options: list[str]) -> dict[str, Any]:
    """Items and their values as an overlay takes them.

    Raises:
        SettingsError: An item is on and off at once, or an option is not ITEM.KEY=VALUE.
    """
    from omni_speech_accel.plugin.settings import SettingsError

    both = sorted(set(on) & set(off))
    if both:
        raise SettingsError(f"{both[0]} is named by --on and by --off")
    chosen: dict[str, Any] = {**dict.fromkeys(on, True), **dict.fromkeys(off, False)}
    for option in options:
        path, separator, value = option.partition("=")
        item, dot, key = path.partition(".")
        if not (separator and dot and item and key):
            raise SettingsError(f"--option takes ITEM.KEY=VALUE, not {option!r}")
        if chosen.get(item) is False:
            raise SettingsError(f"{item} is off, so --option {option} would do nothing")
        known = chosen.get(item)
        chosen[item] = {**(known if isinstance(known, dict) else {}), key: _yaml(value, f"--option {path}")}
    return chosen


def _profile(base: str, name: str | None, platform: PlatformName, place: Place | None, stage: int | None) -> Profile:
    """The overlay's profile, by name or by the base's file name, for the devices that it is written for.

    Raises:
        SettingsError: No profile fits, or the place cannot be had.
    """
    from dataclasses import replace

    from omni_speech_accel.cli.status import guess_platform
    from omni_speech_accel.deploy.profiles import PROFILES, suggest_profile
    from omni_speech_accel.plugin.settings import SettingsError

    keys = ", ".join(profile.key for profile in PROFILES)
    guessed = guess_platform()
    device = guessed.name if platform is PlatformName.auto else platform.value
    found = next((profile for profile in PROFILES if profile.key == name), None) if name else None
    if found is None and name is None:
        candidates = (suggest_profile(base, known) for known in (device, "cuda", "npu"))
        found = next((profile for profile in candidates if profile is not None), None)
    if found is None:
        raise SettingsError(f"no model is known by {name or base}; name one by --profile: {keys}")
    # Not the CPU where a driver is merely missing: an overlay may be written on another machine than the server's.
    cpu = device == "cpu" and name is None and "driver" not in guessed.source
    if platform is not PlatformName.auto or device in found.platforms or cpu:
        found = replace(found, devices=(device,))
    if stage is not None and place is not Place.additional_config:
        raise SettingsError("--stage is the stage of --place additional_config, which is not given")
    if place is Place.additional_config:
        wanted = ("stages", found.stage if stage is None else stage, "additional_config")
        return found if wanted == found.place else replace(found, place=wanted, place_note="")
    if place is Place.connectors and found.place[0] == "stages":
        raise SettingsError(f"{found.base} has no connectors; the block belongs at stages[].additional_config")
    return found


@app.command()
def config(
    base: Annotated[str, typer.Argument(help="Deploy YAML to build on: the host's, by name or path, or your own.")],
    on: Annotated[str | None, typer.Option(help="Items to switch on, comma separated.")] = None,
    off: Annotated[str | None, typer.Option(help="Items to switch off, comma separated.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="Option of an item, ITEM.KEY=VALUE; may repeat. Example: s3_graph.max_graphs=4"),
    ] = None,
    platform: Annotated[
        PlatformName, typer.Option(help="Device that the deploy is for; auto guesses.")
    ] = PlatformName.auto,
    profile: Annotated[str | None, typer.Option(help="Model and device, where BASE's file name does not tell.")] = None,
    place: Annotated[
        Place | None, typer.Option(help="Where the block stands. Default: where it reaches this model's stages.")
    ] = None,
    stage: Annotated[int | None, typer.Option(help="Stage of --place additional_config.", min=0)] = None,
    as_json: Json = False,
) -> None:
    """Print a deploy overlay over BASE with every item listed and explained, chosen ones on or off.

    Redirect it into a file next to BASE and pass it to `vllm serve --omni --deploy-config`. BASE is written as an
    absolute path where it is the host's, since the host looks for a relative one beside the overlay.

    An item that the device or the installed host cannot have is off, with the reason.

    Exit code: 0 printed; 2 an unknown item or option, or a BASE, stage or place in which no item could act;
    130 interrupted.

    Examples:

        omni-speech-accel config minicpmo_4_5.yaml > my.yaml

        omni-speech-accel config minicpmo_4_5.yaml --off s3_graph --option speaker_graph.max_graphs=4
    """
    from omni_speech_accel.deploy.overlay import check_overlay, render_overlay, replaced, unavailable

    with _errors_reported(as_json):
        chosen = _chosen(_names(on), _names(off), option or [])
        found = _profile(base, profile, platform, place, stage)
        path = _base_path(base)
        reasons = unavailable(found)
        here = Path(path).is_file()  # without a host, BASE may be a file of the server's
        text = render_overlay(path, found, chosen, reasons, replaced(path, found) if here else {})
        if here:
            check_overlay(text, path, found, asked=profile is not None)
        for item in chosen:
            if chosen[item] is not False and item in reasons:
                typer.echo(f"warning: {item} is switched on and will not be applied: {reasons[item]}", err=True)
    if as_json:
        import yaml

        typer.echo(json.dumps({"profile": found.key, "overlay": yaml.safe_load(text), "text": text}, indent=2))
    else:
        typer.echo(text, nl=False)


def _base_path(base: str) -> str:
    """``base`` as the overlay names it: the host's own file by its full path, any other as it was given.

    Raises:
        IsADirectoryError: It is a folder.
        SettingsError: There is no such file, neither here nor, for a bare name, among the host's, or its name cannot
            be written.
    """
    from omni_speech_accel.host import source as host
    from omni_speech_accel.plugin.settings import SettingsError

    path, location = base, host.host_info().location
    bare = Path(base).name == base
    if not Path(base).is_file():
        # The host's loader finds its own files by their bare name, with or without the suffix.
        stock = [location / "deploy" / name for name in (base, f"{base}.yaml")] if location is not None and bare else []
        found = next((candidate for candidate in stock if candidate.is_file()), None)
        if found is not None:
            path = str(found)
        elif Path(base).is_dir():
            raise IsADirectoryError(f"{base} is a folder")
        elif location is not None or not bare:
            raise SettingsError(f"{base} does not exist" + (f", here or in {location / 'deploy'}" if location else ""))
    try:
        path.encode()
    except UnicodeEncodeError as error:
        problem = "cannot be read in this locale, or is no UTF-8, so no YAML can hold it; try LC_ALL=C.UTF-8"
        raise SettingsError(f"the name {path!r} {problem}") from error
    return path


register_transitions(app)


def main() -> None:
    """The console script."""
    logging.captureWarnings(True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path that the terminal cannot show
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # None where it was closed
                sys.stdout.flush()
    except SystemExit as done:
        # rich and typer make exit code 1 of a closed pipe, which here says that an item cannot be had.
        if isinstance(done.__context__, BrokenPipeError):
            _stdout_is_gone(READER_GONE)
        raise
    except BrokenPipeError:
        _stdout_is_gone(READER_GONE)
    except OSError as error:
        typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        _stdout_is_gone(WRONG_INPUT)


def _stdout_is_gone(code: int) -> NoReturn:
    """Exit with ``code``, and without a further word on what stdout still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


if __name__ == "__main__":
    main()
