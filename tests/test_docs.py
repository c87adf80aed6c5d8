# SPDX-License-Identifier: Apache-2.0
"""What is written about the items is what the table says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
