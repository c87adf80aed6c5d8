# SPDX-License-Identifier: Apache-2.0
"""The ``omni-speech-accel`` command.

The commands' modules import typer alone: `--help` answers at once, `status` within a second,
and what needs torch or the host is imported by the command that needs it.
With `--json` a command prints one JSON document on stdout and nothing else.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

import typer

from omni_speech_accel import __version__
from omni_speech_accel.cli.compare_modes import compare_modes
from omni_speech_accel.cli.config import config
from omni_speech_accel.cli.measure import ab, bench, verify
from omni_speech_accel.cli.output import (
    READER_GONE,
    WRONG_INPUT,
    Commands,
    stdout_is_gone,
)
from omni_speech_accel.cli.status_command import status
from omni_speech_accel.cli.transitions import transitions

app = typer.Typer(
    name="omni-speech-accel",
    cls=Commands,
    help="Faster speech from stock vllm-omni: see what applies here, prove it, measure it, write its deploy YAML.",
    epilog="Start with `omni-speech-accel status`. Every command takes --help and, for machines, --json.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


for command in (status, verify, bench, ab, config, transitions, compare_modes):
    app.command()(command)


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
            stdout_is_gone(READER_GONE)
        raise
    except BrokenPipeError:
        stdout_is_gone(READER_GONE)
    except OSError as error:
        typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        stdout_is_gone(WRONG_INPUT)


if __name__ == "__main__":
    main()
