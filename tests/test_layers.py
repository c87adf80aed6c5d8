# SPDX-License-Identifier: Apache-2.0
"""The floors of the package: a room imports only what stands below it, and a server never loads what a person runs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from omni_speech_accel.plugin.table import ANCHORS, PATCHES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "omni_speech_accel"
FLOORS = (
    ("environment", "errors", "tolerance"),
    ("host", "runtime"),
    ("plugin", "campplus"),
    ("deploy", "synthetic"),
    ("items",),
    ("anchors",),
    ("measure", "transitions"),
    ("cli",),
    ("__main__",),
)
SERVER = ("environment", "errors", "tolerance", "host", "runtime", "plugin", "campplus", "deploy", "items", "anchors")
PERSON = ("synthetic", "measure", "transitions", "cli")
# Rooms that name host modules: those that wrap or drive the host's code.
NAMES_HOST = {"items", "anchors", "measure", "host", "synthetic"}
# (importer, imported) still to be mended; a pair that is mended must leave this list.
STILL_UP: set[tuple[str, str]] = set()

Import = tuple[str, str]


def modules(package: Path) -> Iterator[tuple[str, ast.Module, str]]:
    """(dotted name below the package, syntax tree, text) of every module."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        yield name, ast.parse(text, str(path)), text


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports anywhere: in functions and for type checks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports of the package are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(package: Path) -> Iterator[Import]:
    """(module, what it imports of the package), both as dotted names below the package."""
    for name, tree, _ in modules(package):
        for target in imports(tree):
            if target.startswith(f"{PACKAGE}."):
                yield name, target.removeprefix(f"{PACKAGE}.")


def room(name: str) -> str:
    return name.split(".")[0]


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(name) in rooms)


def allowed(importer: str, imported: str) -> bool:
    """Whether ``importer`` may import ``imported``."""
    if imported == "__version__" or (importer and room(importer) == room(imported)):
        return True
    return bool(importer) and room(importer) != "transitions" and floor(imported) < floor(importer)


def imports_up(package: Path) -> set[Import]:
    """The imports that do not go down."""
    return {(importer, imported) for importer, imported in own_imports(package) if not allowed(importer, imported)}


def names_of_others(package: Path) -> list[str]:
    """What stands where only another room may say it: device libraries outside ``runtime``, host modules."""
    found = []
    for name, tree, text in modules(package):
        code = "\n".join(line.split("#")[0] for line in text.splitlines())
        device = re.search(r"\btorch\.(cuda|npu)\b(?!_)", re.sub(r'"""(?:.|\n)*?"""|"[^"\n]*"', '""', code))
        if room(name) != "runtime" and device:
            found.append(f"{name} says {device[0]}")
        host = [target for target in imports(tree) if target.split(".")[0] == "vllm_omni"]
        if room(name) not in NAMES_HOST and host:
            found.append(f"{name} imports {host[0]}")
    return found


def reached(package: Path) -> set[str]:
    """Modules that the rooms of a server can load, by any import in them, however late."""
    names = {name for name, _, _ in modules(package)}
    edges: dict[str, set[str]] = {}
    for importer, imported in own_imports(package):
        target = imported if imported in names else imported.rpartition(".")[0]
        edges.setdefault(importer, set()).add(target)
    todo = [name for name in names if name and room(name) in SERVER]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += edges.get(name, ())
    return seen


def for_a_person(names: set[str]) -> set[str]:
    return {name for name in names if room(name) in PERSON}


def test_every_room_has_its_floor() -> None:
    found = {room(name) for name, _, _ in modules(ROOT / PACKAGE) if name}
    assert found == {name for rooms in FLOORS for name in rooms}
    assert set(SERVER + PERSON) == found - {"__main__"}


def test_a_room_imports_only_what_stands_below_it() -> None:
    assert imports_up(ROOT / PACKAGE) == STILL_UP


def test_device_libraries_and_host_modules_are_named_where_they_belong() -> None:
    assert names_of_others(ROOT / PACKAGE) == []


def test_what_runs_in_a_server_imports_nothing_that_runs_for_a_person() -> None:
    assert for_a_person(reached(ROOT / PACKAGE)) == set()


LOAD = f"""
import importlib, sys
from {PACKAGE} import plugin

plugin.register()
assert plugin.is_registered()
for name in sys.argv[1:]:
    importlib.import_module("{PACKAGE}." + name)
print([name for name in sys.modules if name.startswith("{PACKAGE}.") and name.split(".")[1] in {PERSON}])
"""


def loaded(package: Path) -> str:
    """What a process that imports every module of the server's rooms has loaded of the others, as a list's text."""
    names = [name for name, _, _ in modules(package) if room(name) in SERVER]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        capture_output=True, text=True, timeout=120, cwd=package.parent, env={"PYTHONPATH": str(package.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_process_with_every_module_of_a_server_has_none_of_a_persons() -> None:
    assert loaded(ROOT / PACKAGE) == "[]"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to put wrong imports into."""
    return Path(shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__")))


def add(module: Path, line: str) -> None:
    module.write_text(module.read_text(encoding="utf-8") + line, encoding="utf-8")


IN_A_FUNCTION = "\n\ndef late() -> None:\n    "
TYPES_ALONE = "\n\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("where", "line", "importer", "imported"),
    [
        ("plugin/fit.py", f"import {PACKAGE}.items.s3_graph\n", "plugin.fit", "items.s3_graph"),
        ("plugin/fit.py", f"{IN_A_FUNCTION}from {PACKAGE}.anchors import stages\n", "plugin.fit", "anchors.stages"),
        ("host/source.py", f"{TYPES_ALONE}from {PACKAGE}.plugin import table\n", "host.source", "plugin.table"),
        ("runtime/cpu.py", f"from {PACKAGE}.host import source\n", "runtime.cpu", "host.source"),
        ("transitions/plan.py", f"from {PACKAGE} import errors\n", "transitions.plan", "errors"),
        ("measure/abba.py", f"from {PACKAGE}.transitions import plan\n", "measure.abba", "transitions.plan"),
        ("__init__.py", f"from {PACKAGE} import plugin\n", "", "plugin"),
    ],
)  # fmt: skip
def test_an_import_that_goes_up_or_sideways_is_found(
    copy: Path, where: str, line: str, importer: str, imported: str
) -> None:
    add(copy / where, line)
    assert imports_up(copy) - STILL_UP == {(importer, imported)}


def test_a_device_library_or_a_host_module_in_the_wrong_room_is_found(copy: Path) -> None:
    add(copy / "plugin" / "fit.py", "\n\ndevice = torch.npu.current_device()\n")
    add(copy / "deploy" / "files.py", f"{IN_A_FUNCTION}import vllm_omni.config\n")
    assert names_of_others(copy) == ["deploy.files imports vllm_omni.config", "plugin.fit says torch.npu"]


def test_a_way_from_a_server_to_a_persons_module_is_found_however_long(copy: Path) -> None:
    add(copy / "errors.py", f"{IN_A_FUNCTION}from {PACKAGE}.__main__ import main\n")
    assert {"cli.app", "cli.measure", "measure.bench", "transitions.check"} <= for_a_person(reached(copy))


def test_a_module_of_a_persons_that_a_server_loads_is_found(copy: Path) -> None:
    add(copy / "items" / "s3_graph.py", f"import importlib\nimportlib.import_module('{PACKAGE}.measure.abba')\n")
    assert f"'{PACKAGE}.measure.abba'" in loaded(copy)


# ---- rows are data


def not_data(value: object, place: str) -> list[str]:
    """Places in a row that hold anything but words, numbers, and groups and rows of them."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return []
    if isinstance(value, tuple):
        return [bad for number, one in enumerate(value) for bad in not_data(one, f"{place}[{number}]")]
    if isinstance(value, Mapping):
        return [bad for key, one in value.items() for bad in not_data(key, place) + not_data(one, f"{place}.{key}")]
    if is_dataclass(value) and not isinstance(value, type):
        return [bad for one in fields(value) for bad in not_data(getattr(value, one.name), f"{place}.{one.name}")]
    return [f"{place} holds {value!r}"]


def without_a_row(root: Path) -> list[str]:
    """Files of items that no row of the table names. Those that several items share start with an underscore."""
    keys = {patch.key for patch in PATCHES}
    code = {path.stem for path in (root / PACKAGE / "items").glob("*.py")} - {"__init__"}
    shared = {name.removeprefix("_") for name in code if name.startswith("_")}
    tests = {path.stem.removeprefix("test_") for path in (root / "tests" / "items").glob("test_*.py")}
    own = {name for name in code if not name.startswith("_")}
    return sorted((own - keys) | (tests - keys - shared) | (keys - own) | (keys - tests))


def test_rows_hold_no_functions() -> None:
    for row in (*PATCHES, *ANCHORS):
        assert not_data(row, type(row).__name__) == []


def test_a_function_in_a_row_is_found() -> None:
    row = replace(PATCHES[0], hooks=(replace(PATCHES[0].hooks[0], wrapper=print),))
    assert not_data(row, "row") == [f"row.hooks[0].wrapper holds {print!r}"]


def test_every_item_has_a_row_a_module_and_tests() -> None:
    assert without_a_row(ROOT) == []
    text = (ROOT / "docs" / "items.md").read_text(encoding="utf-8")
    assert re.findall(r"^#+ `(\w+)`", text, re.MULTILINE) == [patch.key for patch in PATCHES]


def test_an_item_without_a_row_is_found(tmp_path: Path, copy: Path) -> None:
    shutil.copytree(ROOT / "tests" / "items", tmp_path / "tests" / "items")
    (copy / "items" / "mine.py").touch()
    (tmp_path / "tests" / "items" / "test_s3_graph.py").unlink()
    assert without_a_row(tmp_path) == ["mine", "s3_graph"]


def test_every_function_that_a_row_names_is_there() -> None:
    named = [(patch.module, hook.wrapper) for patch in PATCHES for hook in patch.hooks]
    named += [(patch.module, patch.idle) for patch in PATCHES if patch.idle]
    named += [(anchor.implementation, anchor.wrapper) for anchor in ANCHORS]
    trees = {f"{PACKAGE}.{name}": tree for name, tree, _ in modules(ROOT / PACKAGE)}
    for module, function in named:
        body = trees[module].body
        bound = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        bound |= {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert function in bound, f"{module} has no {function}"
