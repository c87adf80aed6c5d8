# SPDX-License-Identifier: Apache-2.0
"""Whether an overlay that `config` writes does over its base what it says, judged as `status` and the server judge."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_speech_accel.deploy.check import check, refused_model
from omni_speech_accel.deploy.files import DeployFile, check_shape, read_chain
from omni_speech_accel.deploy.layering import ADDITIONAL, merged, stage_ids, stage_layers
from omni_speech_accel.deploy.pipelines import pipeline_of
from omni_speech_accel.deploy.profiles import Profile, profile_for, profile_of
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.settings import BLOCK, SettingsError, parse_block
from omni_speech_accel.plugin.table import PATCHES, Patch


def unavailable(profile: Profile) -> dict[str, str]:
    """Why an item cannot be had on the profile's model and devices, or on the host that is installed, if one is."""
    devices = profile.devices or profile.platforms
    stage = profile.place[1] if profile.place[0] == "stages" else None
    installed = host.host_info().location is not None
    found = {}
    for patch in PATCHES:
        judged = fit(patch) if installed else None
        acts_in = profile.acts_in(patch)
        if acts_in is None:
            found[patch.key] = f"it acts on {patch.where}, which this model has not"
        elif stage not in (None, acts_in):
            found[patch.key] = f"it acts in stage {acts_in}, and this block stands at stage {stage}"
        elif judged is not None and not judged.applies:
            found[patch.key] = judged.reason
        elif not set(devices) & set(patch.platforms):
            found[patch.key] = f"for {' and '.join(patch.platforms)}, not {' or '.join(devices)}"
        elif all(refusals := [refused_model(patch, device) for device in devices]):
            found[patch.key] = refusals[0]
    return found


def _chain(base: str) -> tuple[DeployFile, ...]:
    files = read_chain(Path(base))
    for file in files:
        check_shape(file.content, file.path)
    return files


def replaced(base: str, profile: Profile) -> dict[str, Any]:
    """What ``base`` has in the ``additional_config`` where the profile's block stands: an overlay's replaces it whole.

    Raises:
        FileNotFoundError: A file of the base's chain is missing.
        SettingsError: A file cannot be read as a deploy.
    """
    if profile.place[0] != "stages":
        return {}
    stages: list[Mapping[str, Any]] = merged(_chain(base))["stages"]
    found = next((stage.get(ADDITIONAL) for stage in stages if stage.get("stage_id") == profile.place[1]), None)
    return {key: value for key, value in found.items() if key != BLOCK} if isinstance(found, Mapping) else {}


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers)) or "none"


def _check_pipeline(base: str, files: tuple[DeployFile, ...], profile: Profile, asked: bool) -> None:
    pipeline, _ = pipeline_of(files)
    known = profile_of(pipeline)
    if pipeline is None or pipeline == profile.pipeline or (known is None and asked):
        return
    if known is None:
        raise SettingsError(f"{base} is for the pipeline {pipeline}, in which no item acts")
    raise SettingsError(f"{base} is for the pipeline {pipeline}, and profile {profile.key} for {profile.model}")


def _check_stages(base: str, ids: list[int], profile: Profile) -> None:
    acting = profile.stages()
    wanted = profile.place[1] if profile.place[0] == "stages" else None
    if isinstance(wanted, int) and wanted not in ids:
        raise SettingsError(f"{base} has no stage {wanted} (it has {_listed(ids)})")
    if wanted is not None and wanted not in acting:
        raise SettingsError(f"no item acts in stage {wanted} of {profile.model}; items act in stage {_listed(acting)}")
    if not acting & set(ids):
        raise SettingsError(f"{base} has no stage in which an item acts: it has {_listed(ids)}, not {_listed(acting)}")


def check_overlay(text: str, base: str, profile: Profile, *, asked: bool) -> None:
    """Stop at an overlay over ``base`` that the server would refuse, or in which no item could act.

    Args:
        text: The overlay.
        base: Its base file, as it can be opened from here.
        profile: What the overlay was rendered for.
        asked: Whether the caller named the profile: it then stands for a pipeline that is not known.

    Raises:
        FileNotFoundError: A file of the base's chain is missing.
        SettingsError: The first thing that is wrong.
    """
    files = _chain(base)
    _check_pipeline(base, files, profile, asked)
    _check_stages(base, stage_ids(merged(files)), profile)
    files = (DeployFile("the overlay", yaml.safe_load(text), False), *files)
    for device in profile.devices or profile.platforms:
        try:
            content = check(files, device, pipeline=profile.pipeline).content
        except SettingsError as lost:
            raise SettingsError(f"{lost}{_instead(profile)}") from None
        if not any(stage_layers(content, stage, device) for stage in profile.stages()):
            raise SettingsError(
                f"{BLOCK}: {'.'.join(map(str, profile.place))} of {base} reaches no stage in which an item acts; "
                "use --place additional_config"
            )


def _instead(profile: Profile) -> str:
    """Which option of `config` puts the block elsewhere, where there is one."""
    if profile_for(profile.key).place[0] == "stages":
        return ""
    return " (leave --place out)" if profile.place[0] == "stages" else " (use --place additional_config)"


def _comment(text: str, indent: int) -> list[str]:
    pad = " " * indent + "# "
    return textwrap.wrap(text, 118, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)


def _value(value: Any) -> str:
    """``value`` as one line of YAML; JSON is YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(option)}" for key, option in value.items()) + "}"
    return json.dumps(value)


def _options(patch: Patch) -> str:
    texts = [
        f"{name} (default {json.dumps(field.default)}): {field.description}"
        for name, field in patch.options.model_fields.items()
        if name != "enabled"
    ]
    return f"Options: {' '.join(texts)}" if texts else ""


def _item_lines(patch: Patch, value: Any, reason: str, indent: int) -> Iterable[str]:
    yield from _comment(patch.summary, indent)
    if options := _options(patch):
        yield from _comment(options, indent)
    if reason:
        yield from _comment(f"Not applied here: {reason}.", indent)
    yield f"{' ' * indent}{patch.key}: {_value(value)}"


def render_overlay(
    base: str,
    profile: Profile,
    items: Mapping[str, bool | Mapping[str, Any]] | None = None,
    unavailable: Mapping[str, str] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> str:
    """A deploy overlay over ``base`` with the profile's items, each with a comment on what it does.

    Args:
        base: ``base_config`` of the overlay. The host looks for a relative one beside the overlay.
        profile: The model and platform.
        items: What to write for an item instead of its default; an item outside the profile is written too.
        unavailable: Why an item cannot be had where the overlay is for; it is off unless ``items`` names it.
        beside: What the base has where the block is to stand, if the overlay would replace it.

    Raises:
        SettingsError: ``items`` has an unknown item or a wrong option.
    """
    chosen = dict(items or {})
    reasons = dict(unavailable or {})
    parse_block(chosen, f"{BLOCK}")
    rows = [patch for patch in PATCHES if patch in profile.items() or patch.key in chosen]
    lines = _comment(f"{profile.title}: items of {BLOCK}.", 0)
    lines += _comment("Absent block: stock. An item takes true, false, or a mapping of its options.", 0)
    for note in filter(None, (profile.place_note, *profile.notes)):
        lines += _comment(note, 0)
    lines.append(f"base_config: {json.dumps(base)}")
    indent = 0
    for part in profile.place:
        if isinstance(part, int):
            lines.append(f"{' ' * indent}- stage_id: {part}")
            indent += 2
        else:
            lines.append(f"{' ' * indent}{part}:")
            indent += 2
    if beside:
        lines += textwrap.indent(yaml.safe_dump(dict(beside), sort_keys=False), " " * indent).splitlines()
    lines.append(f"{' ' * indent}{BLOCK}:")
    for patch in rows:
        reason = reasons.get(patch.key, "")
        value = chosen.get(patch.key, patch.default and not reason)
        lines += _item_lines(patch, value, reason, indent + 2)
    return "\n".join(lines) + "\n"


def render_graph_mode_overlay(base: str, mode: str, sizes: Iterable[int], notes: Iterable[str] = ()) -> str:
    """A fish_omni overlay that sets stage 0's graph mode on NPU by hand: one arm of a matched comparison.

    Args:
        base: ``base_config`` of the overlay.
        mode: vLLM's name of the graph mode.
        sizes: Capture sizes in rows; the largest is ``max_num_seqs`` too.
        notes: Comment paragraphs for the head of the file.
    """
    rows = sorted(sizes)
    lines: list[str] = []
    for note in notes:
        lines += _comment(note, 0)
    lines += [
        f"base_config: {json.dumps(base)}",
        "platforms:",
        "  npu:",
        "    stages:",
        "      - stage_id: 0",
        f"        max_num_seqs: {rows[-1]}",
        "        enforce_eager: false",
        "        compilation_config:",
        f"          cudagraph_mode: {mode}",
        f"          cudagraph_capture_sizes: {json.dumps(rows)}",
        f"          max_cudagraph_capture_size: {rows[-1]}",
    ]
    return "\n".join(lines) + "\n"
