# SPDX-License-Identifier: Apache-2.0
"""Deploy overlays with every item of a model listed, rendered from the patch table.

``configs/`` and the CLI's ``config`` command both print what is made here, so
neither can list an item that the table does not have.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from omni_speech_accel.plugin import settings
from omni_speech_accel.plugin.settings import BLOCK, parse_block
from omni_speech_accel.plugin.table import PATCHES, Patch

__all__ = ["PROFILES", "Profile", "profile_for", "render_graph_mode_overlay", "render_overlay", "suggest_profile"]

_SHM = "connector_of_shared_memory"
_DEVICES = {"cuda": "NVIDIA GPUs", "npu": "Ascend NPUs", "cpu": "CPUs"}


@dataclass(frozen=True)
class Profile:
    """A model on a platform.

    ``family`` is the model's name in the table's ``stages`` texts, ``base`` the
    host's deploy file, ``stage`` the one where its items act (most of them, where
    there are several), ``place`` the keys that lead to the block: a connector's
    ``extra`` reaches every stage on that connector and stays out of the compile
    cache's hash; a stage's ``additional_config`` is for a deploy without connectors.
    ``devices`` are the platforms that an overlay is written for, where not all of ``platforms``.
    """

    key: str
    model: str
    family: str
    base: str
    platforms: tuple[str, ...]
    stage: int
    place: tuple[str | int, ...] = ("connectors", _SHM, "extra")
    place_note: str = ""
    notes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The model and the devices that the overlay is for."""
        return f"{self.model} on {' and '.join(_DEVICES[name] for name in self.devices or self.platforms)}"

    def acts_in(self, patch: Patch) -> int | None:
        """The stage of this model in which an item acts, ``None`` where it is for another model."""
        named = re.search(rf"{re.escape(self.family)} stage (\d+)", patch.stages)
        return int(named[1]) if named else self.stage if self.family in patch.stages else None

    def stages(self) -> frozenset[int]:
        """The stages of this model in which an item acts."""
        return frozenset(stage for patch in PATCHES if (stage := self.acts_in(patch)) is not None)

    def items(self) -> tuple[Patch, ...]:
        """The table's rows that can act here, in table order: at the block's stage, where it stands at one."""
        stage = self.place[1] if self.place[0] == "stages" else None
        return tuple(
            patch
            for patch in PATCHES
            if self.family in patch.stages
            and set(self.platforms) & set(patch.platforms)
            and stage in (None, self.acts_in(patch))
        )


PROFILES: tuple[Profile, ...] = (
    Profile("minicpmo_4_5_cuda", "MiniCPM-o 4.5", "MiniCPM-o", "minicpmo_4_5.yaml", ("cuda",), 2),
    Profile(
        "minicpmo_4_5_npu",
        "MiniCPM-o 4.5",
        "MiniCPM-o",
        "minicpmo_4_5.yaml",
        ("npu",),
        2,
        place_note="The block stands in the connector's extra: on NPU the host's own "
        "platforms.npu.stages[2].additional_config replaces stages[2].additional_config, and a block there "
        "would be lost.",
    ),
    Profile(
        "step_audio_2",
        "Step-Audio 2",
        "Step-Audio 2",
        "step_audio_2.yaml",
        ("cuda", "npu"),
        1,
        place=("stages", 1, "additional_config"),
        place_note="This deploy has no connectors, so the block stands at the Token2Wav stage.",
    ),
    Profile(
        "fish_omni_npu",
        "Fish Audio Drama 3 (fish_omni)",
        "fish_omni",
        "fish_omni.yaml",
        ("npu",),
        0,
        notes=(
            "vllm-omni 0.32.0rc1 refuses this deploy on NPU: its stage 0 asks for model runner v2. A host that serves "
            "fish_omni on NPU says so in its own fish_omni.yaml; `omni-speech-accel status --deploy-config` tells.",
        ),
    ),
)


def profile_for(key: str) -> Profile:
    """The profile named ``key``; raises ``KeyError``."""
    for profile in PROFILES:
        if profile.key == key:
            return profile
    raise KeyError(key)


def suggest_profile(base: str, platform: str) -> Profile | None:
    """The profile whose base has the file name of ``base``, or begins it, on ``platform``."""
    name = base.rsplit("/", 1)[-1].removesuffix(".yaml")
    fitting = [
        profile
        for profile in PROFILES
        if name.startswith(profile.base.removesuffix(".yaml")) and platform in profile.platforms
    ]
    return fitting[0] if fitting else None


def _comment(text: str, indent: int) -> list[str]:
    pad = " " * indent + "# "
    return textwrap.wrap(text, 118, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)


def _value(value: Any) -> str:
    """``value`` as one line of YAML; JSON is YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(option)}" for key, option in value.items()) + "}"
    return json.dumps(value)


def _options(patch: Patch) -> str:
    model: type[settings.ItemOptions] = getattr(settings, patch.options)
    texts = [
        f"{name} (default {json.dumps(field.default)}): {field.description}"
        for name, field in model.model_fields.items()
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
