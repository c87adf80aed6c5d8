# SPDX-License-Identifier: Apache-2.0
"""What is made from the patch table is what stands in the repository."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which writes a copy of its files in ``tmp_path``."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(module, "FINGERPRINTS", tmp_path / "fingerprints.json")
    return module


def test_docs_and_configs_are_what_the_table_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "word"),
    [("README.md", "| `s3_graph` |"), ("docs/items.md", "## `s3_graph`"), ("configs/step_audio_2.yaml", "s3_graph")],
)
def test_check_finds_a_file_that_was_edited_and_writing_mends_it(
    tool: ModuleType, tmp_path: Path, name: str, word: str
) -> None:
    assert tool.main(["--check"]) == 0
    path = tmp_path / name
    text = path.read_text()
    path.write_text(text.replace(word, "edited"))
    assert tool.main(["--check"]) == 1
    assert path.read_text() != text
    assert tool.main([]) == 0
    assert path.read_text() == text


def test_a_config_that_the_table_does_not_make_is_told_and_left(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "configs" / "mine.yaml").write_text("base_config: x.yaml\n")
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 1
    assert (tmp_path / "configs" / "mine.yaml").is_file()


def test_fingerprints_are_written_only_when_asked_for_and_keep_those_of_other_hosts(
    tool: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "fingerprints.json"
    assert tool.main([]) == 0
    assert not file.exists()
    assert tool.main(["--check", "--fingerprints"]) == 1
    assert tool.main(["--fingerprints"]) == 0
    assert json.loads(file.read_text()) == tool.verified_fingerprints()
