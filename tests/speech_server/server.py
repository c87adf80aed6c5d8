# SPDX-License-Identifier: Apache-2.0
"""Start and stop a real ``vllm serve --omni`` on this machine's CPU."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import yaml

BLOCK = "omni_speech_accel"
SEED_VARIABLE = "OMNI_SPEECH_TEST_HOST_SEED"
ROW_NOISE_VARIABLE = "OMNI_SPEECH_TEST_HOST_ROW_NOISE"
DEPLOYS = Path(__file__).resolve().parent / "deploy"
GUARD = Path(__file__).resolve().parent / "guard.py"

Profile = Literal["minicpmo", "step_audio2", "two_stage"]
Place = Literal["connector", "stage"]


class ServerError(RuntimeError):
    """The server did not come up, or died. The message ends with the last lines of its log."""


def deploy_config(
    path: Path,
    profile: Profile,
    *,
    block: Any = None,
    place: Place = "connector",
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a deploy YAML of ``profile`` to ``path`` and return it.

    Args:
        block: The value of the key ``omni_speech_accel``; None leaves the key out.
        place: Where the block stands: in the connector's ``extra``, or in ``additional_config`` of every stage
            (Step-Audio 2 has no connector).
        extra: More keys for the connector's ``extra``, such as ``token2wav_n_timesteps``.
    """
    config = yaml.safe_load((DEPLOYS / f"{profile}.yaml").read_text())
    connectors = [connector["extra"] for connector in config.get("connectors", {}).values()]
    for connector in connectors:
        connector.update(copy.deepcopy(dict(extra or {})))
    if block is not None:
        if place == "connector" and not connectors:
            raise ValueError(f"the profile {profile} has no connector; use place='stage'")
        targets = (
            connectors
            if place == "connector"
            else [stage.setdefault("additional_config", {}) for stage in config["stages"]]
        )
        for target in targets:
            target[BLOCK] = copy.deepcopy(block)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def plugins_without(*names: str) -> list[str]:
    """All vLLM plugins of this environment but those named, as ``plugins`` of a server that shall not have these."""
    groups = ("vllm.general_plugins", "vllm_omni.general_plugins")
    found = {entry.name for group in groups for entry in importlib.metadata.entry_points(group=group)}
    return sorted(found - set(names))


class SpeechServer:
    """A context manager around one server process and its children.

    Args:
        deploy_yaml: See :func:`deploy_config`.
        model_dir: See :func:`tests.speech_server.model_dir.build_model_dir`.
        python: The interpreter of the environment that has the host.
        plugins: The names that vLLM may load as plugins; None loads all that are installed.
        seed: Reseed torch before every forward of a speech stage, so that equal requests give equal bytes.
        row_noise: Replace the vocoder's draws, which depend on a row's place in its batch, by a constant: then equal
            requests give equal audio, within rounding, whatever runs beside them.
        extra_env: More environment variables; they win over those set here.
        log: The file for the server's output; default: a temporary file, kept only while the object lives.
        startup_seconds: How long the server may take until it is healthy.

    Raises:
        ServerError: From ``start`` (or ``with``): it died, or was not healthy in time. Nothing is left running.
    """

    def __init__(
        self,
        deploy_yaml: Path,
        *,
        model_dir: Path,
        python: str | Path = sys.executable,
        plugins: Sequence[str] | None = None,
        seed: int | None = None,
        row_noise: bool = False,
        extra_env: Mapping[str, str] | None = None,
        log: Path | None = None,
        startup_seconds: float = 600,
    ) -> None:
        self.deploy_yaml = deploy_yaml
        self.model_dir = model_dir
        self.startup_seconds = startup_seconds
        self._vllm = Path(python).parent / "vllm"
        self._environment = self._make_environment(plugins, seed, row_noise, extra_env)
        if log is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="speech-server-")
            log = Path(self._scratch.name) / "server.log"
        self.log = log
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def _make_environment(
        plugins: Sequence[str] | None, seed: int | None, row_noise: bool, extra: Mapping[str, str] | None
    ) -> dict[str, str]:
        environment = dict(os.environ)
        # What a developer has set must not decide what a test sees.
        for name in ("VLLM_PLUGINS", "OMNI_SPEECH_ACCEL", SEED_VARIABLE, ROW_NOISE_VARIABLE, "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        environment.update(
            # By default the worker is bound to all cores but one, on a machine with two: to one.
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            # Threads that share a core spin: an utterance on two took 10.5 s of CPU, on one 1.9 s.
            OMP_NUM_THREADS="1",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_LOGGING_COLOR="0",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            HF_HUB_OFFLINE="1",
        )
        if plugins is not None:
            environment["VLLM_PLUGINS"] = ",".join(plugins)
        if seed is not None:
            environment[SEED_VARIABLE] = str(seed)
        if row_noise:
            environment[ROW_NOISE_VARIABLE] = "1"
        environment.update(extra or {})
        return environment

    @property
    def url(self) -> str:
        """``http://127.0.0.1:<port>`` of the running server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_lines(self) -> list[str]:
        """What the server and its children have written so far."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def __enter__(self) -> SpeechServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it is healthy."""
        if self.running:
            raise ServerError("the server is running already")
        self.port = _free_port()
        # vLLM leaves its sockets behind, the host its prompt files when it is killed.
        self._temporary = tempfile.TemporaryDirectory(prefix="speech-", ignore_cleanup_errors=True)
        # The guard's pipe is ours alone: it ends the server should this process be killed.
        serve = [self._vllm, "serve", self.model_dir, "--omni", "--deploy-config", self.deploy_yaml]
        listen = ["--host", "127.0.0.1", "--port", self.port]
        # The host's own limit for a stage is 300 s, which a busy machine with two cores can need.
        patience = [f"--stage-init-timeout={self.startup_seconds:.0f}", f"--init-timeout={self.startup_seconds:.0f}"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(part) for part in (sys.executable, GUARD, *serve, *listen, *patience)],
                env={**self._environment, "TMPDIR": self._temporary.name},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.startup_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode} at start; {self._log_end()}")
            if self._healthy():
                return
            time.sleep(0.25)
        raise ServerError(f"the server was not healthy within {self.startup_seconds:.0f} s; {self._log_end()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # refused, reset, timed out, or an HTTP error: all derive from it
            return False

    def _log_end(self, lines: int = 40) -> str:
        return "its log ends with\n" + "\n".join(self.log_lines()[-lines:])

    def stop(self, patience: float = 30) -> None:
        """End the server and all its children: asked first, killed after ``patience`` seconds. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        family = {process.pid, *_descendants(process.pid)}
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        # The session holds whatever outlived its parent, the server itself included.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        self._temporary.cleanup()
        _remove_wake_channels(family)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _descendants(root: int) -> list[int]:
    """Process ids of the children of ``root`` and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (command, which may hold spaces and brackets) state parent ...
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        direct = children.get(waiting.pop(), [])
        found += direct
        waiting += direct
    return found


def _remove_wake_channels(pids: set[int]) -> None:
    """0.32 leaves a file or folder ``omni_shm_wake_<n>_<engine pid>`` in shared memory when it is interrupted."""
    for path in Path("/dev/shm").glob("omni_shm_wake_*"):
        if path.name.rpartition("_")[2] in map(str, pids):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    for inner in path.iterdir():
                        inner.unlink()
                    path.rmdir()
                else:
                    path.unlink()
