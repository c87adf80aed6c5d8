# SPDX-License-Identifier: Apache-2.0
"""What is written about the items is what the table says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from omni_speech_accel.plugin.table import PATCHES

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_item_has_its_module_and_its_tests() -> None:
    for patch in PATCHES:
        assert (ROOT / "omni_speech_accel" / "items" / f"{patch.key}.py").is_file()
        assert (ROOT / "tests" / "items" / f"test_{patch.key}.py").is_file()


def test_no_machine_path_and_no_registry_is_named() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = tracked.stdout.split() if tracked.returncode == 0 else []
    # Spelled in parts, so that this file does not name them itself.
    forbidden = ["/" + "work/", "/" + "opt/venvs", *(name + ".org" for name in ("pypi", "pythonhosted", "pytorch"))]
    for name in files:
        path = ROOT / name
        if path.suffix in {".png", ".wav"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found = [word for word in forbidden if word in text]
        assert not found, f"{name} names {found}"


def test_layers_device_libraries_and_host_modules_stay_where_they_belong() -> None:
    package = ROOT / "omni_speech_accel"
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).as_posix()
        code = "\n".join(line.split("#")[0] for line in path.read_text(encoding="utf-8").splitlines())
        if not relative.startswith("runtime/"):
            assert not re.search(r"\btorch\.(cuda|npu)\b(?!_)", strip_strings(code)), relative
        if not relative.startswith(("items/", "anchors/", "measure/", "synthetic/")):
            assert not re.search(r"^\s*(from|import) vllm_omni\b", code, re.MULTILINE), relative


def strip_strings(code: str) -> str:
    return re.sub(r'"""(?:.|\n)*?"""|"[^"\n]*"', '""', code)
