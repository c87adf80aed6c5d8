#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the CPU environment of one verified host, from nothing, with the standard library alone.

    python tools/make_env.py 0.32.0rc1            # into .venv/0.32.0rc1
    python tools/make_env.py 0.30.0 --dir /some/where
    python tools/make_env.py --relock 0.30.0      # maintainers: resolve again, rewrite tools/locks/0.30.0.txt

``omni_speech_accel/host/stacks.json`` names the hosts and the versions that define them; ``tools/locks/`` holds the
whole resolved set of each. A second run of an environment that is up to date takes a fraction of a second. A build
that was cut short is started anew: a package whose unpacking was interrupted can look installed to pip.

A machine with a GPU or an NPU has its own builds of torch and vLLM. Nothing here is for it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
STACKS = REPO / "omni_speech_accel" / "host" / "stacks.json"
LOCKS = REPO / "tools" / "locks"
LOGS = REPO / ".cache" / "make_env"
TEST_HOST = REPO / "tests" / "speech_server" / "plugin"
# Unpacks 240 packages in a third of pip's time, several at once; both environments link to its one cache.
UV = "uv==0.13.9"
UV_HOME = REPO / ".cache" / "uv"

STAMP = ".make_env.json"
# torchvision and step-audio2 pin torch builds or old libraries that the host does not use with them.
WITHOUT_DEPENDENCIES = ("torchvision", "step-audio2")
# Its library is linked to FFmpeg and CUDA and does not load here; without it vLLM decodes with soundfile.
UNUSABLE_ON_CPU = ("torchcodec",)
# What the processes of `vllm serve --omni` import on their way up, and what flow.yaml of a speech checkpoint names.
MUST_IMPORT = (
    "torchvision",
    "torchaudio.compliance.kaldi",
    "cosyvoice2.flow.flow",
    "vllm_omni.entrypoints.openai.api_server",
    "vllm_omni.worker.gpu_generation_model_runner",
    "vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav",
    "vllm.v1.worker.cpu_worker",
)

# torchvision registers fake kernels of these two operators on import, whether or not its own library, which declares
# them, could be loaded ("operator torchvision::nms does not exist"). The host needs only its pure Python transforms;
# calling a real operator still raises torchvision's own "Couldn't load custom C++ ops".
TORCHVISION_MEND = """

if not _has_ops():  # declared by tools/make_env.py: the C++ library of this wheel needs CUDA
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


class BuildError(RuntimeError):
    """The environment could not be built; the message says what to do."""


def say(version: str, text: str) -> None:
    print(f"[make_env {version}] {text}", flush=True)


def digest(*parts: str | Path) -> str:
    """One hash over texts and the contents of files."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        found.update(b"\0")
    return found.hexdigest()


def normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def read_lock(path: Path) -> dict[str, str]:
    """``{distribution: version}`` of one lock file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {normalized(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def check_lock(stack: dict[str, object], lock: dict[str, str], path: Path) -> None:
    """Raise BuildError where the lock and ``stacks.json`` disagree: then one of them describes no verified stack."""
    packages = stack["packages"]
    assert isinstance(packages, dict)
    wrong = {name: lock.get(normalized(name)) for name, pin in packages.items() if lock.get(normalized(name)) != pin}
    if wrong:
        listed = ", ".join(f"{name} is {packages[name]} in stacks.json and {has} here" for name, has in wrong.items())
        raise BuildError(f"{path}: {listed}")


def find_python(version: str) -> str:
    """An interpreter of that minor version: this one, or ``pythonX.Y`` on the path.

    Raises BuildError if there is none.
    """
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None:
        raise BuildError(
            f"needs Python {version}, this is {sys.version.split()[0]}; "
            f"install python{version} with its venv module and run again"
        )
    return found


class Environment:
    """One virtual environment and the log of how it was built."""

    def __init__(self, version: str, directory: Path) -> None:
        self.version = version
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.log = LOGS / f"{version}.log"
        LOGS.mkdir(parents=True, exist_ok=True)

    @property
    def site_packages(self) -> Path:
        (found,) = (self.directory / "lib").glob("python*/site-packages")
        return found

    def run(self, *command: str | Path, announce: int = 0) -> bool:
        """Run a command with its output in the log; True if it succeeded.

        ``announce``: the number of packages expected, to report how many pip has collected every ten seconds.
        """
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1"}
        # Packages are unpacked without bytecode; importing them writes it for the part that is used, a tenth of them.
        # Without any, each process of a server compiles the host again: 20 s more.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["UV_CACHE_DIR"] = str(UV_HOME / "cache")
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=REPO,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            assert process.stdout is not None
            collected, told = 0, time.monotonic()
            for line in process.stdout:
                log.write(line)
                collected += line.startswith(("Collecting ", "Processing "))
                if announce and line.startswith("Installing collected packages"):
                    say(self.version, f"  unpacking {collected} packages")
                elif announce and collected < announce and time.monotonic() - told > 10:
                    told = time.monotonic()
                    say(self.version, f"  {collected} of {announce} packages collected")
            return process.wait() == 0

    def pip(self, *arguments: str | Path, announce: int = 0) -> None:
        """Run pip in the environment. Raises BuildError with the end of its output."""
        command = (self.python, "-m", "pip", *arguments)
        if not self.run(*command, announce=announce):
            raise BuildError(f"pip {arguments[0]} failed; {self.log} ends with\n{self.log_end()}")

    def log_end(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:])

    def create(self, python: str) -> None:
        """A new, empty virtual environment in place of whatever is there."""
        if self.directory.exists():
            if not (self.directory / STAMP).exists() and any(self.directory.iterdir()):
                raise BuildError(f"{self.directory} was not made by this tool; choose another --dir")
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        (self.directory / STAMP).write_text("{}")  # ours from here on, and not up to date
        self.log.write_text("")
        if not self.run(python, "-m", "venv", self.directory):
            raise BuildError(f"could not create a virtual environment with {python}:\n{self.log_end()}")

    def install_torch(self, wanted: str) -> None:
        """The CPU build; where pip cannot find it, the plain release with whatever that needs."""
        if self.run(self.python, "-m", "pip", "install", "--no-compile", "--no-deps", f"torch=={wanted}"):
            return
        plain = wanted.split("+")[0]
        say(self.version, f"  torch {wanted} is not to be had here; taking torch {plain} (may be a large CUDA build)")
        self.pip("install", "--no-compile", f"torch=={plain}")

    def install_rest(self, lock: dict[str, str]) -> None:
        """All of the lock but torch. uv knows nothing of pip's configuration; where it fails, pip does it."""
        wanted = self.directory / "requirements.txt"
        wanted.write_text("".join(f"{name}=={pin}\n" for name, pin in lock.items() if name != "torch"))
        with only_one(UV_HOME):
            uv = UV_HOME / UV / "bin" / "uv"
            target = ("--target", uv.parent.parent)
            have = uv.exists() or self.run(self.python, "-m", "pip", "install", "--no-deps", *target, UV)
        if have and self.run(uv, "pip", "install", "--python", self.python, "--no-deps", "--requirement", wanted):
            return
        say(self.version, f"  not to be had by {UV} here; pip takes minutes")
        self.pip("install", "--no-compile", "--no-deps", "--requirement", wanted, announce=len(lock) - 1)

    def mend(self) -> None:
        """Make the parts that were built for CUDA work without it."""
        packages = self.site_packages
        # PyPI's torchaudio is linked to CUDA; kaldi fbank and resample, all that the host uses, are Python.
        for library in (packages / "torchaudio" / "lib").glob("*.so"):
            library.unlink()
        extension = packages / "torchvision" / "extension.py"
        text = extension.read_text()
        if TORCHVISION_MEND not in text:
            extension.unlink()  # a link to uv's copy, which stays as it came
            extension.write_text(text + TORCHVISION_MEND)

    def install_project(self, lock: Path) -> None:
        """This package and the speech test host, editable, with what they declare and the environment lacks yet."""
        common = ("install", "--no-build-isolation", "--constraint", lock)
        self.pip(*common, "--editable", f"{REPO}[test]", "--editable", TEST_HOST)

    def verify(self) -> None:
        """Import what the server and a speech checkpoint import. Raises BuildError with the traceback's end."""
        code = f"import importlib\nfor name in {MUST_IMPORT!r}: importlib.import_module(name)"
        if not self.run(self.python, "-c", code):
            raise BuildError(f"the environment was built but does not import:\n{self.log_end()}")


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Hold off a second user of the same directory until the first is done."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def recipe() -> str:
    """What is done to an environment beside the lock, as text."""
    return inspect.getsource(Environment) + TORCHVISION_MEND + repr(MUST_IMPORT)


def project_inputs() -> list[Path]:
    """The files whose change asks for the editable install to be made again (entry points, dependencies)."""
    return [REPO / "setup.cfg", REPO / "pyproject.toml", TEST_HOST / "pyproject.toml"]


def make(version: str, stack: dict[str, object], directory: Path) -> Environment:
    """Bring ``directory`` up to date and return its environment. Raises BuildError."""
    lock_path = LOCKS / f"{version}.txt"
    lock = read_lock(lock_path)
    check_lock(stack, lock, lock_path)
    environment = Environment(version, directory)
    with only_one(directory):
        python = find_python(str(stack["python"]))
        wanted = {
            # The directory: a virtual environment that was moved or copied points at its old place.
            "host": digest(json.dumps(lock, sort_keys=True), recipe(), os.path.realpath(python), str(directory)),
            "project": digest(*project_inputs(), str(REPO)),
        }
        stamp = directory / STAMP
        have = json.loads(stamp.read_text()) if stamp.exists() else {}
        if have == wanted:
            say(version, f"up to date: {directory}")
            return environment
        started = time.monotonic()
        if have.get("host") != wanted["host"]:
            say(version, f"building {directory} (details: {environment.log})")
            environment.create(python)
            environment.install_torch(lock["torch"])
            say(version, f"  installing {len(lock) - 1} more packages")
            environment.install_rest(lock)
            environment.mend()
            say(version, "  checking that the host imports")
            environment.verify()
            stamp.write_text(json.dumps({"host": wanted["host"]}))
        say(version, "  installing omni-speech-accel and its test host, editable")
        environment.install_project(lock_path)
        stamp.write_text(json.dumps(wanted))
        say(version, f"ready in {time.monotonic() - started:.0f} s: {directory}")
    return environment


def relock(version: str, stack: dict[str, object]) -> Path:
    """Let pip resolve the stack's packages and our extras again, and write the lock from what it chose."""
    packages = stack["packages"]
    assert isinstance(packages, dict)
    pins = [f"{name}=={pin}" for name, pin in packages.items() if name not in WITHOUT_DEPENDENCIES]
    environment = Environment(version, REPO / ".cache" / "relock" / version)
    say(version, f"resolving in {environment.directory}")
    environment.create(find_python(str(stack["python"])))
    environment.pip("install", "--no-compile", *pins, f"{REPO}[test]", "--quiet")
    environment.pip("uninstall", "--yes", *UNUSABLE_ON_CPU, "torchvision", "omni-speech-accel")
    environment.pip(
        "install", "--no-compile", "--no-deps", *(f"{name}=={packages[name]}" for name in WITHOUT_DEPENDENCIES)
    )
    listed = subprocess.run(
        [environment.python, "-m", "pip", "list", "--format=freeze", "--exclude", "pip"],
        check=True,
        capture_output=True,
        text=True,
    )
    target = LOCKS / f"{version}.txt"
    target.write_text("\n".join(sorted(listed.stdout.split(), key=str.lower)) + "\n")
    check_lock(stack, read_lock(target), target)
    shutil.rmtree(environment.directory)
    say(version, f"wrote {target}")
    return target


def main() -> int:
    stacks: dict[str, dict[str, object]] = json.loads(STACKS.read_text())["stacks"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", choices=sorted(stacks), help="the vllm-omni version")
    parser.add_argument("--dir", type=Path, help="where to build it (default: .venv/<version> of this repository)")
    parser.add_argument("--relock", action="store_true", help="rewrite the lock of that version; builds nothing else")
    arguments = parser.parse_args()
    version: str = arguments.version
    try:
        if arguments.relock:
            relock(version, stacks[version])
        else:
            make(version, stacks[version], (arguments.dir or REPO / ".venv" / version).absolute())
    except BuildError as error:
        print(f"[make_env {version}] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n[make_env {version}] interrupted; the next run starts this build anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
