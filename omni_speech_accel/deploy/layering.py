# SPDX-License-Identifier: Apache-2.0
"""Which blocks reach which stage of a deploy, told from its files alone.

The host's rules, restated for a reader that may not import it: how a file is
laid over its base, which connector a stage reads, and what a platform's section
does to ``additional_config``. The tests hold each against the host's own loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_speech_accel.deploy.files import DeployFile
from omni_speech_accel.plugin.settings import BLOCK, SettingsError

__all__ = [
    "ADDITIONAL",
    "check_additional",
    "check_connectors",
    "merged",
    "stage_ids",
    "stage_layers",
]

ADDITIONAL = "additional_config"
_NESTED = frozenset(
    {"default_sampling_params", "default_pooling_params", "subtalker_sampling_params", "engine_extras", "engine_args"}
)
"""Stage fields that an overlay adds to; it replaces every other one. Source: ``_DEEP_MERGE_KEYS`` of the host's
``config.stage_config``."""

Layer = tuple[str, Any]


def _deep(base: Any, overlay: Any) -> Any:
    """``overlay`` over ``base``, mapping by mapping; anything else is replaced."""
    if not (isinstance(base, Mapping) and isinstance(overlay, Mapping)):
        return overlay
    return {**base, **{key: _deep(base[key], value) if key in base else value for key, value in overlay.items()}}


def _stages(base: Sequence[Mapping[str, Any]], overlay: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found = {stage.get("stage_id"): stage for stage in base}
    for stage in overlay:
        below = found.get(stage.get("stage_id"), {})
        nested = {key: _deep(below[key], stage[key]) for key in _NESTED if key in below and key in stage}
        found[stage.get("stage_id")] = {**below, **stage, **nested}
    return list(found.values())


def _platforms(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name in {**base, **overlay}:
        below, above = base.get(name) or {}, overlay.get(name) or {}
        result[name] = {**below, **above, "stages": _stages(below.get("stages") or (), above.get("stages") or ())}
    return result


def merged(files: Sequence[DeployFile]) -> dict[str, Any]:
    """The chain ``files`` (the overlay first) as the one deploy that the host makes of it."""
    result: dict[str, Any] = {}
    for file in reversed(files):
        result = {
            **result,
            **file.content,
            "connectors": _deep(result.get("connectors") or {}, file.content.get("connectors") or {}),
            "stages": _stages(result.get("stages") or (), file.content.get("stages") or ()),
            "platforms": _platforms(result.get("platforms") or {}, file.content.get("platforms") or {}),
        }
    return result


def stage_ids(content: Mapping[str, Any]) -> list[int]:
    """Numbers of the stages that a deploy's content lists."""
    return [stage["stage_id"] for stage in content.get("stages") or () if isinstance(stage.get("stage_id"), int)]


def own_additional(stage: Mapping[str, Any]) -> Any:
    """A stage's ``additional_config``, from the three places that the host reads it from; ``None`` without one."""
    found = None
    for holder in (stage.get("engine_extras"), stage, stage.get("engine_args")):
        if isinstance(holder, Mapping) and ADDITIONAL in holder:
            found = _deep(found, holder[ADDITIONAL])
    return found


def platform_entries(content: Mapping[str, Any], platform: str | None) -> Iterator[Mapping[str, Any]]:
    section = (content.get("platforms") or {}).get(platform) or {}
    yield from (entry for entry in section.get("stages") or () if isinstance(entry, Mapping))


def additional_after(entry: Mapping[str, Any], before: Any) -> Any:
    """What a platform's entry of a stage leaves as its ``additional_config``, which is ``before`` without the entry."""
    after = before
    # In the entry's own order: the host applies key by key, and a later one replaces an earlier one's mapping.
    for key, value in entry.get("engine_args", entry).items():
        if key == ADDITIONAL:
            after = value
        elif key == "engine_extras" and isinstance(value, Mapping) and ADDITIONAL in value:
            after = value[ADDITIONAL]
    return after


def edge_extras(content: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Connector ``extra`` of each edge (from stage, to stage); the side that is read first decides."""
    known = content.get("connectors") or {}
    edges: dict[tuple[str, str], Mapping[str, Any]] = {}
    for stage in content.get("stages") or ():
        own = str(stage.get("stage_id"))
        for side, prefix in (("input_connectors", "from_stage_"), ("output_connectors", "to_stage_")):
            for key, reference in (stage.get(side) or {}).items():
                other = str(key).replace(prefix, "")
                edge = (other, own) if side == "input_connectors" else (own, other)
                connector = known.get(reference) if isinstance(reference, str) else reference
                extra = connector.get("extra") if isinstance(connector, Mapping) else None
                edges.setdefault(edge, extra if isinstance(extra, Mapping) else {})
    return edges


def connector_extra(content: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """The ``extra`` that the host hands to ``stage``: of an edge into it, else of one out of it.

    Source: ``engine.stage_init_utils.get_stage_connector_spec``.
    """
    edges = edge_extras(content)
    for side in (1, 0):
        for edge, extra in edges.items():
            if edge[side] == str(stage):
                return extra
    return {}


def _stage_additional(content: Mapping[str, Any], stage: int, platform: str | None) -> Any:
    """The ``additional_config`` of ``stage`` with the platform's section applied; ``None`` without one."""
    stages: list[Mapping[str, Any]] = content.get("stages") or []
    entries = [entry for entry in stages if entry.get("stage_id") == stage]
    config = own_additional(entries[0]) if entries else None
    for override in platform_entries(content, platform):
        if override.get("stage_id") == stage:
            config = additional_after(override, config)
    return config


def check_additional(content: Mapping[str, Any], platform: str | None, file: str) -> None:
    """Stop at a stage's ``additional_config`` that the host refuses: it takes a mapping or null, no JSON text.

    Raises:
        SettingsError: It is something else, once the chain is merged and the platform's section applied.
    """
    for stage in stage_ids(content):
        config = _stage_additional(content, stage, platform)
        if config is not None and not isinstance(config, Mapping):
            raise SettingsError(f"{file}: {ADDITIONAL} of stage {stage} must be a mapping, not {config!r}")


def stage_layers(content: Mapping[str, Any], stage: int, platform: str | None) -> list[Layer]:
    """The blocks that the worker of ``stage`` reads, as layers for :func:`.plugin.settings.resolve`."""
    layers: list[Layer] = []
    extra = connector_extra(content, stage)
    if BLOCK in extra:
        layers.append((f"connectors.*.extra.{BLOCK}", extra[BLOCK]))
    config = _stage_additional(content, stage, platform)
    if isinstance(config, Mapping) and BLOCK in config:
        layers.append((f"stages[{stage}].{ADDITIONAL}.{BLOCK}", config[BLOCK]))
    return layers


def used_connectors(content: Mapping[str, Any]) -> set[str]:
    """Connectors that a stage of the deploy uses."""
    return {
        name
        for stage in content.get("stages") or ()
        for side in ("input_connectors", "output_connectors")
        for name in (stage.get(side) or {}).values()
        if isinstance(name, str)
    }


def check_connectors(content: Mapping[str, Any], file: str) -> None:
    """Stop at a connector that a stage of the merged deploy uses and the host cannot make.

    Raises:
        SettingsError: It has no ``name``, the kind of connector that the host makes.
    """
    known = content.get("connectors") or {}
    used = {f"connectors.{name}": known[name] for name in used_connectors(content) if name in known}
    for stage in content.get("stages") or ():
        for side in ("input_connectors", "output_connectors"):
            for key, connector in (stage.get(side) or {}).items():
                if isinstance(connector, Mapping):
                    used[f"stages[{stage['stage_id']}].{side}.{key}"] = connector
    for place, connector in used.items():
        if "name" not in connector:
            raise SettingsError(f"{file}: {place} has no name (name: SharedMemoryConnector, for one)")
