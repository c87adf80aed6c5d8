# SPDX-License-Identifier: Apache-2.0
"""Blocks in a deploy: found, each in a place that reaches a stage, and each valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_speech_accel.deploy.files import DeployFile
from omni_speech_accel.deploy.layering import (
    ADDITIONAL,
    additional_after,
    connector_extra,
    edge_extras,
    own_additional,
    platform_entries,
    stage_ids,
    used_connectors,
)
from omni_speech_accel.plugin.settings import BLOCK, SettingsError, parse_block

__all__ = ["ANY_CONNECTOR", "ONE_STAGE", "Block", "check_blocks", "check_reached", "find_blocks", "unreached"]

ANY_CONNECTOR = f"connectors.<name>.extra.{BLOCK}"


ONE_STAGE = f"stages[<id>].additional_config.{BLOCK}"


_NEAR_MISS = 0.85
"""difflib ratio from which a key counts as a misspelt block name; the host's closest own key reaches 0.5."""


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


def _held(content: Mapping[str, Any]) -> Iterator[tuple[str | None, str, Mapping[str, Any]]]:
    """``(name, place, extra)`` of every connector with a block; one that stands at a stage has no name."""
    known = content.get("connectors") or {}
    places: list[tuple[str | None, str, Any]] = [(name, f"connectors.{name}", known[name]) for name in known]
    for stage in content.get("stages") or ():
        for side in ("input_connectors", "output_connectors"):
            for key, connector in (stage.get(side) or {}).items():
                places.append((None, f"stages[{stage.get('stage_id')}].{side}.{key}", connector))
    for name, place, connector in places:
        extra = connector.get("extra") if isinstance(connector, Mapping) else None
        if isinstance(extra, Mapping) and BLOCK in extra:
            yield name, f"{place}.extra.{BLOCK}", extra


def unreached(content: Mapping[str, Any], platform: str | None, known: frozenset[int] | None = None) -> Block | None:
    """The first block in a good place that reaches no stage of this deploy all the same.

    Args:
        content: A deploy, its bases merged in.
        platform: The device type that the deploy is to start on.
        known: The pipeline's stages, where they are known.
    """
    used = used_connectors(content)
    stages = frozenset(stage_ids(content))
    stages = stages if known is None else stages & known
    belongs = f"it belongs at stages[<id>].{ADDITIONAL}.{BLOCK}"
    for name, place, extra in _held(content):
        if name is not None and name not in used:
            other = f" or connectors.{sorted(used)[0]}.extra.{BLOCK}" if used else ""
            return Block(place, extra[BLOCK], f"no stage of this deploy uses the connector; {belongs}{other}")
    for block in find_blocks(content):
        if "stages[" not in block.place:
            continue
        number = block.place.split("stages[", 1)[1].split("]", 1)[0]
        if number.lstrip("-").isdigit() and int(number) not in stages:
            return Block(block.place, block.value, f"the deploy has no stage {number}")
    # An edge hands its connector to a stage that only the pipeline lists, too.
    ends = {int(end) for edge in edge_extras(content) for end in edge if end.isdigit()}
    handed = [connector_extra(content, stage) for stage in (stages | ends if known is None else known)]
    for _, place, extra in _held(content):
        if not any(extra is one for one in handed):
            problem = "the host hands this connector to no stage: each reads another one, of the same edge or of an "
            return Block(place, extra[BLOCK], f"{problem}earlier one; {belongs} or at the connector that is read")
    own = {stage.get("stage_id"): stage for stage in content.get("stages") or ()}
    for entry in platform_entries(content, platform):
        before = own_additional(own.get(entry.get("stage_id"), {}))
        after = additional_after(entry, before)
        if isinstance(before, Mapping) and BLOCK in before and not (isinstance(after, Mapping) and BLOCK in after):
            place = f"platforms.{platform}.stages[{entry['stage_id']}].{ADDITIONAL}"
            return Block(
                f"stages[{entry['stage_id']}].{ADDITIONAL}.{BLOCK}",
                before[BLOCK],
                f"on {platform} {place} replaces the mapping that it stands in; it belongs at "
                f"connectors.<name>.extra.{BLOCK} or {place}.{BLOCK}",
            )
    return None


def check_reached(
    content: Mapping[str, Any], platform: str | None, blocks: Sequence[Block], known: frozenset[int] | None = None
) -> None:
    """Stop at a block that reaches no stage (:func:`unreached`).

    Raises:
        SettingsError: There is one; named by its file where ``blocks`` knows it.
    """
    lost = unreached(content, platform, known)
    if lost is not None:
        source = next((block.where for block in blocks if block.place == lost.place), lost.place)
        raise SettingsError(f"{BLOCK}: {source}: {lost.problem}")
