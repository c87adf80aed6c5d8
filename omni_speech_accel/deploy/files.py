# SPDX-License-Identifier: Apache-2.0
"""Every ``omni_speech_accel`` block of a deploy YAML and its ``base_config`` chain, and whether it reaches a stage.

The host accepts unknown keys in some places, rejects them in others and drops
them without a word in the rest. A block in a place that reaches nothing would
leave a server stock that its owner believes accelerated, so it is an error
here, found before any stage process starts.

Nothing here knows the host: what reads a file, and which folder holds the
host's own deploy files, is handed in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omni_speech_accel.plugin.settings import SettingsError

__all__ = [
    "DeployFile",
    "check_shape",
    "expanded",
    "load_file",
    "read_chain",
]

Loader = Callable[[Path], Mapping[str, Any]]


_BASE = "base_config"

_ENVIRONMENT = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,(?P<default>[^}]*))?\}")
"""OmegaConf's environment resolver, the host's YAML reader."""


@dataclass(frozen=True)
class DeployFile:
    """One file of a ``base_config`` chain. ``stock``: it lies in the host's installed deploy folder."""

    path: str
    content: Mapping[str, Any]
    stock: bool


def read_chain(path: Path, load: Loader, stock_folder: Path) -> tuple[DeployFile, ...]:
    """The deploy file ``path`` and its bases, the overlay first.

    A relative ``base_config`` is looked for beside the file that names it, as
    the host does.

    Raises:
        FileNotFoundError: A file of the chain is missing; the message names who asked for it.
        SettingsError: The chain runs in a circle.
    """
    files: list[DeployFile] = []
    seen: set[Path] = set()
    stock_root = stock_folder.resolve()
    asked_by = ""
    while True:
        real = path.resolve()
        if not real.is_file():
            beside = stock_root / path.name
            hint = f"; the host has one at {beside}: name it by that path" if asked_by and beside.is_file() else ""
            raise FileNotFoundError(f"{asked_by}{path} does not exist{hint}")
        if real in seen:
            raise SettingsError(f"{asked_by}{path} closes a circle of {_BASE} files")
        seen.add(real)
        content = load(path) or {}
        files.append(DeployFile(str(path), content, real.is_relative_to(stock_root)))
        base = content.get(_BASE)
        if base is None:
            return tuple(files)
        asked_by = f"{path}: {_BASE}: "
        path = path.parent / _expand(str(base), asked_by)


def _expand(text: str, asked_by: str) -> str:
    """``text`` with the host's ``${oc.env:NAME}`` replaced, for a loader that leaves it as it stands."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            raise FileNotFoundError(f"{asked_by}the environment variable {match['name']} is not set")
        return found

    return _ENVIRONMENT.sub(value, text)


def expanded(node: Any, asked_by: str) -> Any:
    """A file's content with every ``${oc.env:NAME}`` replaced, for a loader that leaves them as they stand.

    Raises:
        FileNotFoundError: A variable is not set and has no default.
    """
    if isinstance(node, Mapping):
        return {key: expanded(value, f"{asked_by}{key}: ") for key, value in node.items()}
    if isinstance(node, list):
        return [expanded(value, asked_by) for value in node]
    if not isinstance(node, str):
        return node
    whole = _ENVIRONMENT.fullmatch(node)
    if whole and whole["name"] not in os.environ and (whole["default"] or "").strip() == "null":
        return None
    return _expand(node, asked_by)


def check_shape(content: Mapping[str, Any], file: str) -> None:
    """Stop at what neither the host nor this package can read as a deploy: a list for a mapping, a stage without id.

    Raises:
        SettingsError: The first such place, with its file.
    """
    for name, connector in _mapping(content, "connectors", file).items():
        _whole(connector, f"connectors.{name}", file)
        _mapping(connector, "extra", file, f"connectors.{name}", null=False)
    _check_stages(content, "", file)
    for name in _mapping(content, "platforms", file):
        _check_stages(_mapping(content["platforms"], name, file, "platforms"), f"platforms.{name}", file)


def _wrong(file: str, place: str, wanted: str, value: Any) -> SettingsError:
    return SettingsError(f"{file}: {place} must be {wanted}, not {value!r}")


def _whole(value: Any, place: str, file: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(file, place, "a mapping", value)
    return value


def _mapping(node: Mapping[str, Any], key: Any, file: str, at: str = "", *, null: bool = True) -> Mapping[str, Any]:
    """The mapping ``node[key]``, empty where there is none; ``null``: whether it may be null."""
    if key not in node or (null and node[key] is None):
        return {}
    return _whole(node[key], f"{at}.{key}" if at else str(key), file)


def _check_stages(node: Mapping[str, Any], at: str, file: str) -> None:
    place = f"{at}.stages" if at else "stages"
    stages = node.get("stages")
    if stages is None:
        return
    if not isinstance(stages, list):
        raise _wrong(file, place, "a list", stages)
    for index, stage in enumerate(stages):
        where = f"{place}[{index}]"
        if "stage_id" not in _whole(stage, where, file):
            raise SettingsError(f"{file}: {where} has no stage_id")
        _mapping(stage, "engine_extras", file, where)
        for side in ("input_connectors", "output_connectors"):
            for key, connector in _mapping(stage, side, file, where).items():
                if not isinstance(connector, str):
                    edge = f"{where}.{side}.{key}"
                    _mapping(_whole(connector, edge, file), "extra", file, edge, null=False)
        for key in ("engine_args", "runtime"):
            _mapping(stage, key, file, where, null=False)
        for holder in (stage, stage.get("engine_args") or {}, stage.get("engine_extras") or {}):
            config = holder.get("compilation_config")
            sizes = config.get("cudagraph_capture_sizes") if isinstance(config, Mapping) else None
            listed = isinstance(sizes, list) and all(isinstance(size, int | str) for size in sizes)
            if sizes is not None and not listed:
                raise _wrong(file, f"{where}.compilation_config.cudagraph_capture_sizes", "a list of numbers", sizes)


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, as the host's loader does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, from keys that are all different."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_file(path: Path) -> Mapping[str, Any]:
    """A deploy file's content, its environment variables replaced.

    Raises:
        SettingsError: It is no YAML that the host could read as a deploy.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is no valid YAML: {error}") from error
    if content is not None and not isinstance(content, Mapping):
        raise SettingsError(f"{path} holds no mapping")
    found: Mapping[str, Any] = expanded(content or {}, f"{path}: ")
    check_shape(found, str(path))
    return found
