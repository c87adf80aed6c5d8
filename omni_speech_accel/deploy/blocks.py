# SPDX-License-Identifier: Apache-2.0
"""Blocks in a deploy: found, each in a place that the host hands on, each valid, and each read by a stage.

The host accepts unknown keys in some places, rejects them in others and drops
them without a word in the rest. A block that reaches nothing would leave a
server stock that its owner believes accelerated, so it is an error here, found
before any stage process starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omni_speech_accel.deploy.files import DeployFile
from omni_speech_accel.deploy.layering import (
    ADDITIONAL,
    SIDES,
    merged,
    own_additional,
    section_additional,
    stage_ids,
    stage_layers,
    transfer,
)
from omni_speech_accel.plugin.settings import BLOCK, SettingsError, parse_block

ANY_CONNECTOR = f"connectors.<name>.extra.{BLOCK}"
ONE_STAGE = f"stages[<id>].{ADDITIONAL}.{BLOCK}"

_NEAR_MISS = 0.85
"""difflib ratio from which a key counts as a misspelt block name; the host's closest own key reaches 0.5."""

_Part = str | int
_Path = tuple[_Part, ...]
_ANY = object()
_STAGE = ("stages", int)
_PLATFORM_STAGE = ("platforms", _ANY, "stages", int)
_NESTED = ("engine_args", "engine_extras")

# Paths where the host stops with an error of its own on a key it does not know.
_STRICT: tuple[tuple[Any, ...], ...] = tuple(
    (*stage, *nested) for stage in (_STAGE, _PLATFORM_STAGE) for nested in ((), *((name,) for name in _NESTED))
)
# Paths of the mappings whose keys the host hands on unread to a stage.
_HOLDERS: tuple[tuple[Any, ...], ...] = (
    ("connectors", _ANY, "extra"),
    *((*_STAGE, side, _ANY, "extra") for side in SIDES),
    *((*strict, ADDITIONAL) for strict in _STRICT),
)


@dataclass(frozen=True)
class Block:
    """One ``omni_speech_accel`` block.

    ``path`` leads to it, stages named by their id. ``problem`` says why it reaches no stage and where it belongs;
    ``""`` where the host hands it on.
    """

    path: _Path
    value: Any
    problem: str = ""
    file: str = ""

    @property
    def place(self) -> str:
        """The path as a dotted text."""
        return _dotted(self.path)

    @property
    def where(self) -> str:
        """Place, with the file in front where one is known."""
        return f"{self.file}: {self.place}" if self.file else self.place

    @property
    def section(self) -> str | None:
        """The platform in whose section it stands, if it does."""
        return str(self.path[1]) if self.path[0] == "platforms" else None

    @property
    def stage(self) -> int | None:
        """The stage whose entry it stands in, ``None`` for a named connector's."""
        at = self.path[2:] if self.section is not None else self.path
        return at[1] if at[0] == "stages" and isinstance(at[1], int) else None

    @property
    def holder(self) -> _Path:
        """What it stands in: a connector, or a stage's ``additional_config`` however that is spelt."""
        if self.path[0] == "connectors":
            return self.path[:2]
        return self.path[:4] if self.section is not None or self.path[2] in SIDES else self.path[:2]


def _matches(parts: _Path, pattern: tuple[Any, ...]) -> bool:
    return len(parts) == len(pattern) and all(
        wanted is _ANY or (isinstance(part, int) if wanted is int else part == wanted)
        for part, wanted in zip(parts, pattern, strict=True)
    )


def _dotted(parts: _Path) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _belongs(parts: _Path) -> str:
    """Where a block that stands at ``parts`` should stand instead."""
    for stage in (_STAGE, _PLATFORM_STAGE):
        if _matches(parts[: len(stage)], stage):
            return f"{_dotted(parts[: len(stage)])}.{ADDITIONAL}.{BLOCK}"
    if len(parts) >= 2 and parts[0] == "connectors":
        return f"{_dotted(parts[:2])}.extra.{BLOCK}"
    return f"{ANY_CONNECTOR} (the stages on that connector) or {ONE_STAGE} (one stage)"


def _problem(parts: _Path, root: Mapping[str, Any]) -> str:
    if any(_matches(parts, pattern) for pattern in _STRICT):
        return f"the host rejects the key here; it belongs at {_belongs(parts)}"
    if not any(_matches(parts, pattern) for pattern in _HOLDERS):
        return f"the host ignores the key here; it belongs at {_belongs(parts)}"
    if parts[0] == "platforms" and parts[4] != "engine_args" and _has_engine_args(root["platforms"][parts[1]], parts):
        return f"the host reads only engine_args of this entry; it belongs at {_dotted(parts[:4])}.engine_args" + (
            f".{ADDITIONAL}.{BLOCK}"
        )
    return ""


def _has_engine_args(section: Mapping[str, Any], parts: _Path) -> bool:
    entries = (entry for entry in section["stages"] if isinstance(entry, Mapping))
    return any(entry.get("stage_id") == parts[3] and "engine_args" in entry for entry in entries)


def _misspelt(key: str) -> bool:
    if key == BLOCK:
        return False
    plain = key.lower().replace("-", "_")
    return difflib.SequenceMatcher(None, plain, BLOCK).ratio() >= _NEAR_MISS


def find_blocks(content: Mapping[str, Any], file: str = "") -> Iterator[Block]:
    """Every block in a deploy file's content, good or not, misspelt names included. Parses no block."""
    yield from _walk((), content, content, file)


def _walk(parts: _Path, node: Any, root: Mapping[str, Any], file: str, flaw: str = "") -> Iterator[Block]:
    """``flaw``: why no block below this node reaches a stage."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            name = str(key)
            if name == BLOCK:
                yield Block((*parts, name), value, flaw or _problem(parts, root), file)
            elif _misspelt(name):
                yield Block((*parts, name), value, f'unknown key; did you mean "{BLOCK}"?', file)
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


def check_blocks(files: Sequence[DeployFile]) -> tuple[Block, ...]:
    """Every block of the chain, each in a place that the host hands on and each valid.

    Raises:
        SettingsError: The first block that is not, with its file, its place and what would be right.
    """
    blocks = tuple(block for file in files for block in find_blocks(file.content, file.path))
    for block in blocks:
        if block.problem:
            raise SettingsError(f"{BLOCK}: {block.where}: {block.problem}")
        parse_block(block.value, block.where)
    return blocks


class _Mark:
    """Stands in a block's value through all merging, to tell whose block arrives where."""

    def __init__(self, block: Block) -> None:
        self.block = block


def _marked(node: Any, marks: Iterator[_Mark]) -> Any:
    """``node`` with the next mark in each block, in the order of :func:`find_blocks`."""
    if isinstance(node, list):
        return [_marked(value, marks) for value in node]
    if not isinstance(node, Mapping):
        return node
    copied = {}
    for key, value in node.items():
        if str(key) == BLOCK:
            mark = next(marks)
            copied[key] = {**value, mark: None} if isinstance(value, Mapping) else mark
        else:
            copied[key] = _marked(value, marks)
    return copied


def _marks(block: Any) -> set[_Mark]:
    if isinstance(block, Mapping):
        return {key for key in block if isinstance(key, _Mark)}
    return {block} if isinstance(block, _Mark) else set()


def _kept(content: Mapping[str, Any]) -> set[_Mark]:
    """The blocks of the files that are still in the deploy once they are merged."""
    holders = [connector.get("extra") for connector in (content.get("connectors") or {}).values()]
    for stage in content.get("stages") or ():
        references = [reference for side in SIDES for reference in (stage.get(side) or {}).values()]
        holders += [reference.get("extra") for reference in references if isinstance(reference, Mapping)]
    holders += [own_additional(content, stage) for stage in stage_ids(content)]
    for platform, section in (content.get("platforms") or {}).items():
        numbers = {entry["stage_id"] for entry in (section or {}).get("stages") or ()}
        holders += [section_additional(content, stage, platform, None) for stage in numbers]
    return {mark for holder in holders if isinstance(holder, Mapping) for mark in _marks(holder.get(BLOCK))}


@dataclass(frozen=True)
class Reading:
    """A block and what becomes of it.

    ``stages`` read it. Where none does, ``lost`` says why, unless the block is for another platform's start or
    ``instead``, another block, stands where the host reads.
    """

    block: Block
    stages: frozenset[int] = frozenset()
    lost: str = ""
    instead: Block | None = None


def read_by(
    files: Sequence[DeployFile], platform: str | None, known: frozenset[int] | None = None
) -> tuple[Reading, ...]:
    """For every block of a chain of good shape, the stages that read it on ``platform``, or why none does.

    Args:
        files: The chain, the overlay first, its blocks in good places.
        platform: The device type that the deploy is to start on.
        known: The pipeline's stages, where they are known.
    """
    chain: list[DeployFile] = []
    marks: list[_Mark] = []
    for file in files:
        own = [_Mark(block) for block in find_blocks(file.content, file.path)]
        chain.append(replace(file, content=_marked(file.content, iter(own))))
        marks += own
    content = merged(chain)
    edges, _ = transfer(content)
    # An edge hands its connector to a stage that only the pipeline lists, too.
    ends = {int(end) for edge in edges for end in edge if end.isdigit()}
    listed = frozenset(stage_ids(content))
    readers: dict[_Mark, set[int]] = {mark: set() for mark in marks}
    for stage in listed | ends if known is None else known:
        for _, value in stage_layers(content, stage, platform):
            for mark in _marks(value):
                readers[mark].add(stage)
    kept = _kept(content)
    stages = listed if known is None else listed & known
    found = []
    for mark in marks:
        block, lost, instead = mark.block, "", None
        if block.stage is not None and block.stage not in stages:
            lost = f"the deploy has no stage {block.stage}"
        elif mark not in kept:
            there = [other.block for other in marks if other in kept and other.block.holder == block.holder]
            instead = there[0] if there else None
            lost = "" if instead is not None else _replaced(mark, chain)
        elif not readers[mark] and block.section in (None, platform):
            over = [other.block for other in marks if block.stage in readers[other] and other.block.section == platform]
            if block.section is None and ADDITIONAL in block.path and over:
                instead = over[0]  # a deploy for several platforms
            else:
                lost = _unread(block, content, platform)
        found.append(Reading(block, frozenset(readers[mark]), lost, instead))
    return tuple(found)


def _replaced(mark: _Mark, chain: Sequence[DeployFile]) -> str:
    """Which file of the chain takes a block's mapping away."""
    number = next(index for index, file in enumerate(chain) if file.path == mark.block.file)
    while number > 0 and mark in _kept(merged(chain[number:])):
        number -= 1
    own = chain[number].path == mark.block.file
    what = "a later entry, or another key, of the same stage" if own else chain[number].path
    return (
        f"{what} replaces what it stands in (the host merges connectors, engine_args and engine_extras key by key, "
        f"and replaces any other key of a stage whole); repeat the block there, or write {BLOCK}: false there"
    )


def _unread(block: Block, content: Mapping[str, Any], platform: str | None) -> str:
    """Why no stage reads a block that is in the merged deploy."""
    belongs = f"it belongs at {ONE_STAGE}"
    if ADDITIONAL in block.path:
        place = f"platforms.{platform}.stages[{block.stage}].{ADDITIONAL}"
        return (
            f"on {platform} {place} replaces the mapping that it stands in; it belongs at {ANY_CONNECTOR} or "
            f"{place}.{BLOCK}"
        )
    _, problem = transfer(content)
    if problem:
        return f"the host hands no connector to any stage of this deploy: {problem}"
    references = [
        name for stage in content.get("stages") or () for side in SIDES for name in (stage.get(side) or {}).values()
    ]
    used = sorted(name for name in references if isinstance(name, str))
    if block.stage is None and block.path[1] not in used:
        other = f" or connectors.{used[0]}.extra.{BLOCK}" if used else ""
        return f"no stage of this deploy uses the connector; {belongs}{other}"
    return (
        "the host hands this connector to no stage: each reads another one, of the same edge or of an earlier one; "
        f"{belongs} or at the connector that is read"
    )
