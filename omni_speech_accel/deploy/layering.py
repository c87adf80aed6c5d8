# SPDX-License-Identifier: Apache-2.0
"""What a stage of a deploy is handed, told from its files alone.

The host's rules, restated once for a reader that may not import it: how a file
is laid over its base, which connector a stage reads, and what a platform's
section does to ``additional_config``. The tests hold each against the host's
own loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_speech_accel.deploy.files import DeployFile
from omni_speech_accel.plugin.settings import BLOCK, SettingsError

ADDITIONAL = "additional_config"
SIDES = {"input_connectors": "from_stage_", "output_connectors": "to_stage_"}
"""The keys of a stage that name its connectors, and what stands before the other stage's number there."""
_NESTED = frozenset(
    {"default_sampling_params", "default_pooling_params", "subtalker_sampling_params", "engine_extras", "engine_args"}
)
"""Stage fields that an overlay adds to; it replaces every other one. Source: ``_DEEP_MERGE_KEYS`` of the host's
``config.stage_config``."""

Layer = tuple[str, Any]
Edge = tuple[str, str]


def _deep(base: Any, overlay: Any) -> Any:
    """``overlay`` over ``base``, mapping by mapping; anything else is replaced."""
    if not (isinstance(base, Mapping) and isinstance(overlay, Mapping)):
        return overlay
    return {**base, **{key: _deep(base[key], value) if key in base else value for key, value in overlay.items()}}


def _stages(base: Sequence[Mapping[str, Any]], overlay: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found = {stage["stage_id"]: stage for stage in base}
    for stage in overlay:
        below = found.get(stage["stage_id"], {})
        nested = {key: _deep(below[key], stage[key]) for key in _NESTED if key in below and key in stage}
        found[stage["stage_id"]] = {**below, **stage, **nested}
    return list(found.values())


def _platforms(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name in {**base, **overlay}:
        below, above = base.get(name) or {}, overlay.get(name) or {}
        result[name] = {**below, **above, "stages": _stages(below.get("stages") or (), above.get("stages") or ())}
    return result


def merged(files: Sequence[DeployFile]) -> dict[str, Any]:
    """The chain ``files`` (the overlay first) as the one deploy that the host makes of it.

    A file without a base stays as it is, entries of one ``stage_id`` included. Source: ``resolve_deploy_yaml``.
    """
    result = dict(files[-1].content)
    for file in reversed(files[:-1]):
        below, above = result, file.content
        result = {
            **below,
            **above,
            "connectors": _deep(below.get("connectors") or {}, above.get("connectors") or {}),
            "stages": _stages(below.get("stages") or (), above.get("stages") or ()),
            "platforms": _platforms(below.get("platforms") or {}, above.get("platforms") or {}),
        }
    return result


def stage_ids(content: Mapping[str, Any]) -> list[int]:
    """Numbers of the stages that a deploy's content lists, each once."""
    numbers = (stage["stage_id"] for stage in content.get("stages") or ())
    return list(dict.fromkeys(number for number in numbers if isinstance(number, int)))


def _part(holder: Mapping[str, Any] | None) -> dict[str, Any]:
    return {ADDITIONAL: holder[ADDITIONAL]} if holder and ADDITIONAL in holder else {}


def own_additional(content: Mapping[str, Any], stage: int) -> Any:
    """The ``additional_config`` of ``stage`` before a platform's section; ``None`` without one.

    From the three places that the host reads it from, of the last entry of the stage: the host keeps that one alone.
    """
    entries = [entry for entry in content.get("stages") or () if entry["stage_id"] == stage]
    if not entries:
        return None
    flat = _deep(_part(entries[-1]), _part(entries[-1].get("engine_args")))
    return _deep(_part(entries[-1].get("engine_extras")), flat).get(ADDITIONAL)


def section_additional(content: Mapping[str, Any], stage: int, platform: str | None, before: Any) -> Any:
    """What a platform's section leaves as the ``additional_config`` of ``stage``, which is ``before`` without it."""
    after = before
    section = (content.get("platforms") or {}).get(platform) or {}
    for entry in section.get("stages") or ():
        if entry["stage_id"] != stage:
            continue
        # In the entry's own order: the host applies key by key, and a later one replaces an earlier one's mapping.
        for key, value in entry.get("engine_args", entry).items():
            if key == ADDITIONAL:
                after = value
            elif key == "engine_extras" and isinstance(value, Mapping) and ADDITIONAL in value:
                after = value[ADDITIONAL]
    return after


def _additional(content: Mapping[str, Any], stage: int, platform: str | None) -> Any:
    """The ``additional_config`` that ``stage`` starts with; a section's entry of a stage not listed does nothing."""
    if stage not in stage_ids(content):
        return None
    return section_additional(content, stage, platform, own_additional(content, stage))


def check_additional(
    content: Mapping[str, Any], platform: str | None, file: str, known: frozenset[int] | None = None
) -> None:
    """Stop at a stage's ``additional_config`` that the host refuses: it takes a mapping or null, no JSON text.

    Raises:
        SettingsError: It is something else, once the chain is merged and the platform's section applied.
    """
    for stage in stage_ids(content):
        config = _additional(content, stage, platform)
        started = known is None or stage in known
        if started and config is not None and not isinstance(config, Mapping):
            raise SettingsError(f"{file}: {ADDITIONAL} of stage {stage} must be a mapping, not {config!r}")


def runs_v2(content: Mapping[str, Any], platform: str) -> bool:
    """Whether a stage of the deploy asks for model runner v2, the platform's section applied."""
    section = (content.get("platforms") or {}).get(platform) or {}
    stages = [*(section.get("stages") or ())]
    if section.get("model_runner") != "v1":  # a platform's v1 takes the stages' own v2 back
        stages += content.get("stages") or ()
    default = section.get("model_runner", content.get("model_runner"))
    return default == "v2" or any(stage.get("model_runner") == "v2" for stage in stages)


class _Refused(Exception):
    """The host makes no transfer config of this deploy, for the reason given."""


def _connectors(content: Mapping[str, Any]) -> Iterator[tuple[str, Edge, Mapping[str, Any]]]:
    """``(place, edge, connector)`` in the order in which the host reads them."""
    runtime = content.get("runtime") or {}
    known = (runtime if "connectors" in runtime else content).get("connectors") or {}
    for stage in content.get("stages") or ():
        own = str(stage["stage_id"])
        for side, prefix in SIDES.items():
            at = f"stages[{own}].{side}"
            if side not in stage:
                continue
            if stage[side] is None:
                raise _Refused(f"{at} is null")
            for key, reference in stage[side].items():
                if not isinstance(key, str):
                    raise _Refused(f"{at}: the key {key!r} must be text")
                if isinstance(reference, str) and reference not in known:
                    raise _Refused(f"{at}.{key}: Undefined connector reference: {reference}")
                inline = not isinstance(reference, str)
                other = key.replace(prefix, "")
                edge = (other, own) if side == "input_connectors" else (own, other)
                place = f"{at}.{key}" if inline else f"connectors.{reference}"
                yield place, edge, reference if inline else known[reference]


def transfer(content: Mapping[str, Any]) -> tuple[dict[Edge, Mapping[str, Any]], str]:
    """Connector ``extra`` of each edge (from stage, to stage), and why the host makes no edge at all, or ``""``.

    The side that is read first decides an edge. One mistake anywhere, and the host logs a line and hands no connector
    to any stage. Source: ``omni_connectors.utils.initialization.load_omni_transfer_config``.
    """
    edges: dict[Edge, Mapping[str, Any]] = {}
    names: dict[Edge, Any] = {}
    try:
        for place, edge, connector in _connectors(content):
            if "name" not in connector:
                raise _Refused(f"{place} has no name (name: SharedMemoryConnector, for one)")
            if names.setdefault(edge, connector["name"]) != connector["name"]:
                kinds = f"{names[edge]} and {connector['name']}"
                raise _Refused(f"Connector type mismatch for edge {'->'.join(edge)}: {kinds} ({place})")
            edges.setdefault(edge, connector.get("extra", {}))
    except _Refused as reason:
        return {}, str(reason)
    # Edges of the file without a connector get one of the host's, with an empty extra.
    listed = (content.get("runtime") or {}).get("edges", content.get("edges"))
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, Mapping):
            break
        ends = (entry.get("from"), entry.get("to"))
        if None not in ends:
            edges.setdefault((str(ends[0]), str(ends[1])), {})
    return edges, ""


def _numbered(edge: Edge) -> bool:
    try:
        return bool([int(end) for end in edge])
    except ValueError:
        return False


def connector_extra(content: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """The ``extra`` that the host hands to ``stage``: of an edge into it, else of one out of it.

    Source: ``engine.stage_init_utils.get_stage_connector_spec``. Stage 0 reads its edges of both ways in their order.
    """
    edges, _ = transfer(content)
    own = str(stage)
    received = [edge for edge in edges if edge[1] == own or (edge[0] == own == "0")]
    sent = [edge for edge in edges if edge[0] == own]
    # The host drops all edges of the first kind where one of them has no number.
    usable = [*(received if all(map(_numbered, received)) else ()), *sent]
    return edges[usable[0]] if usable else {}


def stage_layers(content: Mapping[str, Any], stage: int, platform: str | None) -> list[Layer]:
    """The blocks that the worker of ``stage`` reads, as layers for :func:`.plugin.settings.resolve`."""
    layers: list[Layer] = []
    extra = connector_extra(content, stage)
    if BLOCK in extra:
        layers.append((f"connectors.*.extra.{BLOCK}", extra[BLOCK]))
    config = _additional(content, stage, platform)
    if isinstance(config, Mapping) and BLOCK in config:
        layers.append((f"stages[{stage}].{ADDITIONAL}.{BLOCK}", config[BLOCK]))
    return layers
