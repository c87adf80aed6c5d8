# SPDX-License-Identifier: Apache-2.0
"""Starts a server and waits until it is ready, runs a client against it, and leaves no process of either behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class RunFailed(Exception):
    """A server or a client run failed; the message names its log."""


@contextlib.contextmanager
def running_server(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, name: str, port: int, timeout_s: float
) -> Iterator[float]:
    """The server that `command` starts on `port`, healthy; yields its start-up time in seconds. Stopped at the end.

    Raises:
        RunFailed: The port is taken, or the server ended or did not come up.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise RunFailed(f"something listens on port {port} already; stop it or give another --port")
    begun = time.monotonic()
    with _running(command, environment, log, patience_s=60) as process:
        while not _healthy(port):
            if process.poll() is not None:
                raise RunFailed(f"the server of {name} ended with {process.returncode} at start; see {log}")
            if time.monotonic() - begun > timeout_s:
                raise RunFailed(f"the server of {name} was not up in {timeout_s:g} s; see {log}")
            time.sleep(0.2)
        yield time.monotonic() - begun


def wait_for(command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_s: float) -> int:
    """Run a command with its output in `log`; its exit code. Raises `RunFailed` when it takes too long."""
    with _running(command, environment, log, patience_s=10) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"not finished in {timeout_s:g} s; see {log}") from error


@contextlib.contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, patience_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; at the end asked to stop, and all of its session killed after `patience_s`."""
    with log.open("wb") as stream:
        stream.write(f"$ {shlex.join(command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        # Engine and worker processes may outlive their parent and keep the cards.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(port: int) -> bool:
    # A proxy of the environment has no business between this machine and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
