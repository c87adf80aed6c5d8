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

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_speech_accel.plugin.settings import BLOCK, SettingsError, parse_block

__all__ = [
    "ANY_CONNECTOR",
    "ONE_STAGE",
    "Block",
    "DeployFile",
    "check_blocks",
    "check_shape",
    "expanded",
    "find_blocks",
    "read_chain",
]

Loader = Callable[[Path], Mapping[str, Any]]

ANY_CONNECTOR = f"connectors.<name>.extra.{BLOCK}"
ONE_STAGE = f"stages[<id>].additional_config.{BLOCK}"

_BASE = "base_config"
_NEAR_MISS = 0.85
"""difflib ratio from which a key counts as a misspelt block name; the host's closest own key reaches 0.5."""

_ENVIRONMENT = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,(?P<default>[^}]*))?\}")
"""OmegaConf's environment resolver, the host's YAML reader."""

_Part = str | int
_ANY = object()
_STAGE = ("stages", int)
_PLATFORM_STAGE = ("platforms", _ANY, "stages", int)
_NESTED = ("engine_args", "engine_extras")

# Paths of the mappings whose keys the host hands on unread to a stage.
_HOLDERS: tuple[tuple[Any, ...], ...] = (
    ("connectors", _ANY, "extra"),
    (*_STAGE, "input_connectors", _ANY, "extra"),
    (*_STAGE, "output_connectors", _ANY, "extra"),
    *(
        (*stage, *nested, "additional_config")
        for stage in (_STAGE, _PLATFORM_STAGE)
        for nested in ((), *((name,) for name in _NESTED))
    ),
)
# Paths where the host stops with an error of its own on a key it does not know.
_STRICT: tuple[tuple[Any, ...], ...] = tuple(
    (*stage, *nested) for stage in (_STAGE, _PLATFORM_STAGE) for nested in ((), *((name,) for name in _NESTED))
)


@dataclass(frozen=True)
class DeployFile:
    """One file of a ``base_config`` chain. ``stock``: it lies in the host's installed deploy folder."""

    path: str
    content: Mapping[str, Any]
    stock: bool


@dataclass(frozen=True)
class Block:
    """One ``omni_speech_accel`` block.

    ``place`` is its dotted path, stages named by their id. ``problem`` says why
    it reaches no stage and where it belongs; ``""`` where the host hands it on.
    """

    place: str
    value: Any
    problem: str = ""
    file: str = ""

    @property
    def where(self) -> str:
        """Place, with the file in front where one is known."""
        return f"{self.file}: {self.place}" if self.file else self.place


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


def _matches(parts: tuple[_Part, ...], pattern: tuple[Any, ...]) -> bool:
    return len(parts) == len(pattern) and all(
        wanted is _ANY or (isinstance(part, int) if wanted is int else part == wanted)
        for part, wanted in zip(parts, pattern, strict=True)
    )


def _dotted(parts: tuple[_Part, ...]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _belongs(parts: tuple[_Part, ...]) -> str:
    """Where a block that stands at ``parts`` should stand instead."""
    if _matches(parts[:2], _STAGE):
        return f"{_dotted(parts[:2])}.additional_config.{BLOCK}"
    if _matches(parts[:4], _PLATFORM_STAGE):
        return f"{_dotted(parts[:4])}.additional_config.{BLOCK}"
    if len(parts) >= 2 and parts[0] == "connectors":
        return f"{_dotted(parts[:2])}.extra.{BLOCK}"
    return f"{ANY_CONNECTOR} (the stages on that connector) or {ONE_STAGE} (one stage)"


def _problem(parts: tuple[_Part, ...], root: Mapping[str, Any]) -> str:
    if any(_matches(parts, pattern) for pattern in _STRICT):
        return f"the host rejects the key here; it belongs at {_belongs(parts)}"
    if not any(_matches(parts, pattern) for pattern in _HOLDERS):
        return f"the host ignores the key here; it belongs at {_belongs(parts)}"
    if parts[0] == "platforms" and parts[4] != "engine_args" and "engine_args" in _entry(root, parts):
        return f"the host reads only engine_args of this entry; it belongs at {_dotted(parts[:4])}.engine_args" + (
            f".additional_config.{BLOCK}"
        )
    return ""


def _entry(root: Mapping[str, Any], parts: tuple[_Part, ...]) -> Mapping[str, Any]:
    for stage in root["platforms"][parts[1]]["stages"]:
        if stage.get("stage_id") == parts[3]:
            found: Mapping[str, Any] = stage
            return found
    return {}


def _misspelt(key: str) -> bool:
    if key == BLOCK:
        return False
    plain = key.lower().replace("-", "_")
    return difflib.SequenceMatcher(None, plain, BLOCK).ratio() >= _NEAR_MISS


def find_blocks(content: Mapping[str, Any], file: str = "") -> Iterator[Block]:
    """Every block in a deploy file's content, good or not, misspelt names included. Parses no block."""
    yield from _walk((), content, content, file)


def _walk(parts: tuple[_Part, ...], node: Any, root: Mapping[str, Any], file: str, flaw: str = "") -> Iterator[Block]:
    """``flaw``: why no block below this node reaches a stage."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            name = str(key)
            if name == BLOCK:
                yield Block(_dotted((*parts, name)), value, flaw or _problem(parts, root), file)
            elif _misspelt(name):
                yield Block(_dotted((*parts, name)), value, f'unknown key; did you mean "{BLOCK}"?', file)
            else:
                yield from _walk((*parts, name), value, root, file, flaw)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            stage = value.get("stage_id") if isinstance(value, Mapping) else None
            if isinstance(stage, int) and not isinstance(stage, bool):
                yield from _walk((*parts, stage), value, root, file, flaw)
            else:
                wrong = f"the stage_id of this entry must be a number, not {stage!r}" if stage is not None else flaw
                yield from _walk((*parts, index), value, root, file, wrong)


def check_blocks(files: tuple[DeployFile, ...]) -> tuple[Block, ...]:
    """Every block of the chain, each in a place that reaches a stage and each valid.

    Raises:
        SettingsError: The first block that is not, with its file, its place and what would be right.
    """
    blocks = tuple(block for file in files for block in find_blocks(file.content, file.path))
    for block in blocks:
        if block.problem:
            raise SettingsError(f"{BLOCK}: {block.where}: {block.problem}")
        parse_block(block.value, block.where)
    return blocks
