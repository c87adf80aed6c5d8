# SPDX-License-Identifier: Apache-2.0
"""The environment builder: what it does again, what it does not, and what it refuses. pip itself is not run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
STACKS: dict[str, dict[str, Any]] = json.loads((REPO / "omni_speech_accel" / "host" / "stacks.json").read_text())[
    "stacks"
]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/make_env.py with its lock and log folders in ``tmp_path`` and a lock of two packages."""
    spec = importlib.util.spec_from_file_location("make_env", REPO / "tools" / "make_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_env", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOCKS", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    (tmp_path / "1.0.txt").write_text("torch==2.0+cpu\nvllm_omni==1.0\n")
    return module


class Recorder:
    """Stands for what an environment does to the machine; ``fails_at`` cuts a build short like a signal would."""

    def __init__(self, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails_at = ""

        def record(name: str) -> None:
            def act(environment: Any, *arguments: Any, **options: Any) -> bool:
                if name == self.fails_at:
                    raise KeyboardInterrupt
                self.done.append(name)
                return True

            monkeypatch.setattr(tool.Environment, name, act)

        for name in ("run", "install_torch", "install_rest", "mend", "install_project", "verify"):
            record(name)

    def take(self) -> list[str]:
        done, self.done = self.done, []
        return done


HOST_STEPS = ["run", "install_torch", "install_rest", "mend", "verify"]
STACK = {"python": PYTHON, "packages": {"vllm-omni": "1.0", "torch": "2.0+cpu"}}


@pytest.fixture
def recorder(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(tool, monkeypatch)


def test_second_run_does_nothing(tool: ModuleType, recorder: Recorder, tmp_path: Path) -> None:
    tool.make("1.0", STACK, tmp_path / "env")
    assert recorder.take() == [*HOST_STEPS, "install_project"]
    tool.make("1.0", STACK, tmp_path / "env")
    assert recorder.take() == []


@pytest.mark.parametrize("step", [*HOST_STEPS[1:]])
def test_interrupted_host_build_starts_anew(tool: ModuleType, recorder: Recorder, tmp_path: Path, step: str) -> None:
    recorder.fails_at = step
    with pytest.raises(KeyboardInterrupt):
        tool.make("1.0", STACK, tmp_path / "env")
    leftover = tmp_path / "env" / "half-unpacked"
    leftover.write_text("")
    recorder.fails_at = ""
    recorder.take()
    tool.make("1.0", STACK, tmp_path / "env")
    assert recorder.take() == [*HOST_STEPS, "install_project"]
    assert not leftover.exists()


def test_interrupted_project_install_keeps_the_host(tool: ModuleType, recorder: Recorder, tmp_path: Path) -> None:
    recorder.fails_at = "install_project"
    with pytest.raises(KeyboardInterrupt):
        tool.make("1.0", STACK, tmp_path / "env")
    recorder.fails_at = ""
    recorder.take()
    tool.make("1.0", STACK, tmp_path / "env")
    assert recorder.take() == ["install_project"]


def test_changed_dependencies_install_only_the_project(
    tool: ModuleType, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.make("1.0", STACK, tmp_path / "env")
    recorder.take()
    changed = tmp_path / "setup.cfg"
    changed.write_text("[metadata]\n")
    monkeypatch.setattr(tool, "project_inputs", lambda: [changed])
    tool.make("1.0", STACK, tmp_path / "env")
    assert recorder.take() == ["install_project"]


def test_changed_lock_builds_the_host_anew(tool: ModuleType, recorder: Recorder, tmp_path: Path) -> None:
    tool.make("1.0", STACK, tmp_path / "env")
    recorder.take()
    (tmp_path / "1.0.txt").write_text("torch==2.0+cpu\nvllm_omni==1.0\nnew==3\n")
    tool.make("1.0", STACK, tmp_path / "env")
    assert recorder.take() == [*HOST_STEPS, "install_project"]


def test_folder_of_someone_else_is_refused_and_kept(tool: ModuleType, recorder: Recorder, tmp_path: Path) -> None:
    theirs = tmp_path / "env" / "thesis.txt"
    theirs.parent.mkdir()
    theirs.write_text("years of work")
    with pytest.raises(tool.BuildError, match="not made by this tool"):
        tool.make("1.0", STACK, theirs.parent)
    assert theirs.read_text() == "years of work"


def test_lock_that_disagrees_with_the_stack_is_refused(tool: ModuleType, recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(tool.BuildError, match=r"vllm-omni is 2\.0 in stacks\.json and 1\.0 here"):
        tool.make("1.0", {**STACK, "packages": {"vllm-omni": "2.0"}}, tmp_path / "env")
    assert recorder.take() == []


def test_missing_python_is_named(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    with pytest.raises(tool.BuildError, match=r"needs Python 3\.99"):
        tool.find_python("3.99")


def test_mending_twice_changes_nothing_more(tool: ModuleType, tmp_path: Path) -> None:
    packages = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    extension = packages / "torchvision" / "extension.py"
    library = packages / "torchaudio" / "lib" / "libtorchaudio.so"
    for file in (extension, library):
        file.parent.mkdir(parents=True)
        file.write_text("def _has_ops(): return False\n")
    cached = tmp_path / "cached.py"
    cached.hardlink_to(extension)
    environment = tool.Environment("1.0", tmp_path / "env")
    environment.mend()
    assert cached.read_text() == "def _has_ops(): return False\n", "uv links its cache's files into the environment"
    once = extension.read_text()
    environment.mend()
    assert extension.read_text() == once
    assert once.count("torch.library.define") == 1
    assert not library.exists()


@pytest.mark.parametrize("version", STACKS)
def test_committed_lock_holds_the_verified_versions(tool: ModuleType, version: str) -> None:
    path = REPO / "tools" / "locks" / f"{version}.txt"
    tool.check_lock(STACKS[version], tool.read_lock(path), path)


@pytest.mark.parametrize(
    ("cpu_build_is_there", "installed"),
    [(True, [["--no-deps", "torch==2.0+cpu"]]), (False, [["--no-deps", "torch==2.0+cpu"], ["torch==2.0"]])],
)
def test_plain_torch_with_its_dependencies_stands_in_for_a_missing_cpu_build(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_build_is_there: bool,
    installed: list[list[str]],
) -> None:
    asked: list[list[str]] = []

    def run(environment: Any, *command: Any, **options: Any) -> bool:
        words = [str(word) for word in command]
        asked.append(words[words.index("--no-compile") + 1 :])
        return cpu_build_is_there or "+" not in words[-1]

    monkeypatch.setattr(tool.Environment, "run", run)
    tool.Environment("1.0", tmp_path / "env").install_torch("2.0+cpu")
    assert asked == installed


@pytest.mark.parametrize(
    ("fails", "installers"),
    [("", ["pip", "uv"]), ("uv pip install", ["pip", "uv", "pip"]), ("--target", ["pip", "pip"])],
)
def test_pip_installs_what_uv_cannot(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, installers: list[str]
) -> None:
    asked: list[str] = []

    def run(environment: Any, *command: Any, **options: Any) -> bool:
        asked.append("uv" if Path(command[0]).name == "uv" else "pip")
        return not fails or fails not in " ".join(str(word) for word in command)

    monkeypatch.setattr(tool, "UV_HOME", tmp_path / "uv")
    monkeypatch.setattr(tool.Environment, "run", run)
    (tmp_path / "env").mkdir()
    tool.Environment("1.0", tmp_path / "env").install_rest({"torch": "2.0+cpu", "vllm-omni": "1.0"})
    assert asked == installers
    assert (tmp_path / "env" / "requirements.txt").read_text() == "vllm-omni==1.0\n"
