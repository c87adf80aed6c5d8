# SPDX-License-Identifier: Apache-2.0
"""What every command does with stdout, with an error or a signal that ends it, and with its folder of results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from omni_speech_accel.errors import RunError, UsageError, UserError
from omni_speech_accel.transitions import CannotCompare

if TYPE_CHECKING:
    from rich.console import Console


# Exit codes of every command; the last two are what a shell shows of one that SIGINT or SIGPIPE ended.
OK = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
READER_GONE = 141


def _say_document(message: str, code: int) -> None:
    typer.echo(json.dumps({"error": message, "exit_code": code}, indent=2))


def fail(message: str, as_json: bool, code: int) -> typer.Exit:
    """Say what is wrong: on stderr for people, and with ``--json`` as the one document on stdout too."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    if as_json:
        _say_document(message, code)
    return typer.Exit(code)


def ready_folder(folder: Path | None, option: str = "--out", *, holds: str = "", overwrite: bool = False) -> None:
    """Make the folder, and a file in it, now: a long run must not end in a place that cannot be written.

    Args:
        holds: The file by which a folder is known to hold the results of an earlier run.
        overwrite: They may be replaced.

    Raises:
        OSError: It cannot be made or written; names the option.
        UsageError: It holds the results of an earlier run.
    """
    if folder is None:
        return
    try:
        for path in (folder, *folder.parents):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(f"{path} is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: the path holds a null byte
        raise OSError(f"{option}: {error}") from error
    if holds and not overwrite and (folder / holds).exists():
        raise UsageError(f"{option}: {folder} holds {holds} of an earlier run: give another folder, or --overwrite")


_UsageError: Any = typer.BadParameter.__base__
"""Every mistake that typer finds itself; typer brings its own copy of click, or uses the installed one."""


class Commands(TyperGroup):
    """The commands; with ``--json`` among the arguments, what typer refuses is a document too."""

    @contextlib.contextmanager
    def _refusals_reported(self, arguments: list[str]) -> Iterator[None]:
        try:
            yield
        except _UsageError as error:
            if "--json" in arguments:
                _say_document(error.format_message(), error.exit_code)
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


def _stdout_fd() -> int | None:
    """The file descriptor behind ``sys.stdout``, where there is one."""
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[Console]:
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
def errors_reported(as_json: bool) -> Iterator[None]:
    """Turn an error into a message and its exit code: 2 what the user can mend, 1 a run that broke.

    Any other is a defect of ours, or the host's: its traceback is what helps, and ``--json`` still gets its document.
    """
    try:
        yield
    except (UserError, CannotCompare, OSError) as error:
        raise fail(str(error), as_json, WRONG_INPUT) from error
    except RunError as error:
        raise fail(str(error), as_json, FAILED) from error
    except (typer.Exit, _UsageError):
        raise
    except Exception as error:
        if as_json:
            _say_document(f"{type(error).__name__}: {error}", FAILED)
        raise
    except KeyboardInterrupt:
        raise fail("interrupted before there was anything to report", as_json, INTERRUPTED) from None


@contextlib.contextmanager
def stops_early() -> Iterator[None]:
    """Let SIGTERM, which ``timeout`` and a cancelled job send, end a run as Ctrl-C does: what is done is reported."""
    try:
        # Through SIGINT's own handler: asyncio's, where it is at work.
        before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    except ValueError:  # not the main thread: the process's owner decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stdout_is_gone(code: int) -> NoReturn:
    """Exit with ``code``, and without a further word on what stdout still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)
