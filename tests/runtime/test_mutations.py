# SPDX-License-Identifier: Apache-2.0
"""Each rule of the runtime is proven: with its code taken out, the simulated accelerator's suite fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator import slot_taken_by

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutations.py"


def load_tool() -> object:
    spec = importlib.util.spec_from_file_location("mutations", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_guarantee_of_the_graph_cache_has_a_mutation() -> None:
    numbers = {mutation.guarantee.split()[0] for mutation in load_tool().MUTATIONS}  # type: ignore[attr-defined]
    assert {str(number) for number in range(1, 14)} <= numbers


def test_mutation_that_no_longer_applies_is_reported(tmp_path: Path) -> None:
    tool = load_tool()
    tool.copy_package(tmp_path)  # type: ignore[attr-defined]
    stale = tool.Mutation("none", "stale", "graph_cache.py", "text that is not there", "")  # type: ignore[attr-defined]
    assert not tool.mutate(tmp_path, stale)  # type: ignore[attr-defined]
    twice = tool.Mutation("none", "ambiguous", "graph_cache.py", "self", "")  # type: ignore[attr-defined]
    assert not tool.mutate(tmp_path, twice)  # type: ignore[attr-defined]


@pytest.mark.skipif(slot_taken_by() is not None, reason="torch's slot for an out-of-tree device is taken here")
def test_suite_notices_every_mutation() -> None:
    # In a process of its own: it forks, and this one has the package imported already.
    run = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, timeout=1800, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "SURVIVED" not in run.stdout
