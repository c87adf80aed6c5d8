#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From nothing to accelerated speech and a measurement, on a CPU; needs Python 3.11 and pip's package index.

    python tools/demo.py             # what `make demo` runs; results in demo_out/

It builds the environment, makes a speech model with random weights (so the sound is noise of the right length), starts
the real ``vllm serve --omni`` with the package on, has it speak in the voice of a real recording, and runs the
benchmark of the package against stock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SERVED_BLOCK = {"omni_speech_accel": True}
CODES = 75  # three seconds: 25 codec tokens make one


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print what is being done, and how long it took."""
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    yield
    print(f"   ({time.monotonic() - started:.0f} s)", flush=True)


def default_version() -> str:
    found: str = json.loads((REPO / "omni_speech_accel" / "host" / "stacks.json").read_text())["default"]
    return found


def call(command: list[str]) -> int:
    """Run a command to its end, and to its own end where this process is interrupted; returns its exit code."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # From a terminal the command has been interrupted too, and may have something to write.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.terminate()
        process.wait()
        raise


def enter_environment(version: str, arguments: list[str]) -> int:
    """Build the environment and become this script inside it; returns only where the build fails."""
    with step(f"Environment: vllm-omni {version} on CPU"):
        if built := call([sys.executable, str(REPO / "tools" / "make_env.py"), version]):
            return built
    python = str(REPO / ".venv" / version / "bin" / "python")
    sys.stdout.flush()
    # In this process's place: a signal to it must reach the one that has a server to stop.
    os.execv(python, [python, __file__, "--inside", *arguments])


def show_start_up_lines(lines: list[str]) -> None:
    """The package's own account of each stage, one state a line."""
    for line in lines:
        if (start := line.find("omni_speech_accel ")) >= 0 and ": stage " in line:
            head, _, items = line[start:].partition(": on: ")
            print(f"   {head}")
            for part in f"on: {items}".split("; "):
                print(f"     {part}")


def speak(model: Path, reference: Path, out: Path) -> None:
    """Serve ``model`` with the package on, ask for one utterance twice, and save it. Raises ServerError."""
    from tests.speech_server.client import random_codes, synthesize
    from tests.speech_server.server import SpeechServer, deploy_config

    deploy = deploy_config(out / "deploy.yaml", "minicpmo", block=True)
    print(f"   deploy file: {deploy} (the block: {json.dumps(SERVED_BLOCK)})", flush=True)
    with SpeechServer(deploy, model_dir=model, log=out / "server.log") as server:
        print(f"   up at {server.url}; log: {server.log}")
        show_start_up_lines(server.log_lines())
        for turn in ("first request, a voice never heard", "second request, the same voice"):
            started = time.monotonic()
            wav = synthesize(server.url, random_codes(CODES), reference)
            print(f"   {turn}: {wav.seconds:.2f} s of {wav.rate} Hz audio in {time.monotonic() - started:.2f} s")
        (out / "speech.wav").write_bytes(wav.data)
    print(f"   saved {out / 'speech.wav'} (reference: {out / 'reference.wav'}); server stopped")


def show(out: Path) -> int:
    """Everything after the environment, inside it; returns the exit code."""
    sys.path.insert(0, str(REPO))
    from omni_speech_accel.synthetic import reference_wavs
    from tests.speech_server.model_dir import build_model_dir, ensure_checkpoint
    from tests.speech_server.server import ServerError

    out.mkdir(parents=True, exist_ok=True)
    with step("Model directory: random weights, real layout"):
        checkpoint = ensure_checkpoint(REPO / ".cache" / "models" / "small", size="small")
        model = build_model_dir(out / "model", checkpoint)
        reference = shutil.copyfile(reference_wavs(out / "references")[0], out / "reference.wav")
        print(f"   {model}")
    try:
        with step("Real server with the package on: vllm serve --omni"):
            speak(model, reference, out)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    with step("Benchmark: stock against the package, same process, same work"):
        command = Path(sys.executable).parent / "omni-speech-accel"
        code = call([str(command), "bench", "--model", str(checkpoint), "--out", str(out / "bench"), "--overwrite"])
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "demo_out", help="folder for the results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    # Imported packages keep their bytecode; without it each process of the server compiles the host again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Python ends at SIGTERM without a word; as an interrupt it passes every `with`, the server's among them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not arguments.inside:
            return enter_environment(default_version(), ["--out", str(out)])
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        return show(out)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
