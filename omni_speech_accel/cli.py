# SPDX-License-Identifier: Apache-2.0
"""The ``omni-speech-accel`` command.

Only typer is imported here: `--help` answers at once, `status` within a second,
and what needs torch or the host is imported by the command that needs it.
With `--json` a command prints one JSON document on stdout and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omni_speech_accel import __version__
from omni_speech_accel.transitions.command import register as register_transitions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app", "main"]

OK, FAILED, WRONG_INPUT = 0, 1, 2

app = typer.Typer(
    name="omni-speech-accel",
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


def _fail(message: str, as_json: bool, code: int = WRONG_INPUT) -> typer.Exit:
    """Say what is wrong, where the caller reads it."""
    if as_json:
        typer.echo(json.dumps({"error": message, "exit_code": code}, indent=2))
    else:
        typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    return typer.Exit(code)


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
    from omni_speech_accel.bench.errors import BenchError
    from omni_speech_accel.settings import SettingsError

    try:
        yield
    except (BenchError, SettingsError, FileNotFoundError) as error:
        raise _fail(str(error), as_json) from error


def _names(value: str | None) -> list[str]:
    return [name.strip() for name in (value or "").split(",") if name.strip()]


def _extras(pairs: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs, values read as YAML.

    Raises:
        BenchError: A pair has no ``=``.
    """
    import yaml

    from omni_speech_accel.bench.errors import BenchError

    found = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise BenchError(f"--extra takes KEY=VALUE, not {pair!r}")
        found[key] = yaml.safe_load(value)
    return found


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

    Exit code: 0 everything asked for applies; 1 something asked for cannot be had; 2 the deploy YAML is wrong.

    Examples:

        omni-speech-accel status

        omni-speech-accel status --deploy-config my.yaml --json
    """
    from omni_speech_accel import status as module

    with _errors_reported(as_json):
        chosen = None
        with contextlib.ExitStack() as stack:
            if ask_host or deploy_config is not None:
                stack.enter_context(_stdout_kept_clean())
            if platform is not PlatformName.auto:
                chosen = module.Platform(platform.value, "--platform")
            elif ask_host:
                chosen = module.detect_platform()
            found = module.collect(deploy_config, platform=chosen, ask_host=ask_host)
    if as_json:
        typer.echo(found.as_json())
    else:
        from omni_speech_accel.tables import print_status

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
    2 wrong usage.

    Examples:

        omni-speech-accel verify

        omni-speech-accel verify --model /models/MiniCPM-o-4_5 --items sync_free_prompt,speaker_device --json
    """
    with _errors_reported(as_json), _stdout_kept_clean() as console:
        from omni_speech_accel.bench.command import run_verify

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
            out.mkdir(parents=True, exist_ok=True)
            (out / "verify.json").write_text(report.as_json(every_comparison=True) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(report.as_json())
    else:
        from omni_speech_accel.tables import print_verify

        print_verify(report)
    raise typer.Exit(OK if report.ok else FAILED)


register_transitions(app)


def main() -> None:
    """The console script."""
    logging.captureWarnings(True)
    app()


if __name__ == "__main__":
    main()
