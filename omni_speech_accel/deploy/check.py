# SPDX-License-Identifier: Apache-2.0
"""The one check of a deploy, which the server's start, ``status`` and ``config`` share.

A block that somebody wrote is honoured, refused, or told of: what stops the
start is raised, and what does nothing here but may be meant so is a notice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from omni_speech_accel.deploy.blocks import Block, Reading, check_blocks, find_blocks, read_by
from omni_speech_accel.deploy.files import DeployFile, check_shape, read_chain, stock_folder
from omni_speech_accel.deploy.layering import check_additional, merged, runs_v2
from omni_speech_accel.deploy.profiles import profile_of
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.settings import BLOCK, SettingsError
from omni_speech_accel.plugin.table import Patch

_RUNNER = "Model Runner V2 is not supported on"
"""What the host says in ``config.stage_config`` where it refuses a deploy on a platform."""

_NEAR_MISS = 0.7
"""difflib ratio from which a platform's name counts as a misspelt one; ``gpu`` and ``npu`` reach 0.67."""


@dataclass(frozen=True)
class Notice:
    """A block that does nothing at this start. ``level``: ``warning``, or ``hint`` where it looks meant so."""

    level: str
    text: str


@dataclass(frozen=True)
class Checked:
    """A deploy that may start: merged, with its blocks and what there is to say of them."""

    content: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    notices: tuple[Notice, ...] = ()


def has_block(files: Sequence[DeployFile]) -> bool:
    """Whether somebody wrote a block, misspelt or misplaced ones included."""
    return any(True for file in files for _ in find_blocks(file.content))


def check(
    files: Sequence[DeployFile],
    platform: str | None,
    *,
    stages: frozenset[int] | None = None,
    pipeline: str | None = None,
) -> Checked:
    """Check a deploy's shape and every block in it.

    Args:
        files: The chain, the overlay first.
        platform: The device type that the deploy is to start on.
        stages: The pipeline's stages, where they are known.
        pipeline: The host's pipeline key, where it is known.

    Raises:
        SettingsError: What stops the start, with file and place.
    """
    try:
        for file in files:
            check_shape(file.content, file.path)
    except SettingsError as error:
        if has_block(files):
            raise
        return Checked(notices=(Notice("warning", str(error)),))  # the host may start it all the same: its own affair
    content = merged(files)
    check_additional(content, platform, files[0].path, stages)
    blocks = check_blocks(files)
    check_blocks([DeployFile(files[0].path, content, False)])  # a place can be spoilt by another file of the chain
    readings = read_by(files, platform, stages)
    for reading in readings:
        if reading.lost:
            raise SettingsError(f"{BLOCK}: {reading.block.where}: {reading.lost}")
    return Checked(content, blocks, tuple(_notices(readings, platform, pipeline)))


def refused_model(patch: Patch, platform: str) -> str:
    """Why the host starts no model of an item on ``platform`` from its own deploy files, or ``""``."""
    profiles = (profile_of(model.pipeline) for model in patch.acts)
    reasons = [_refused_base(profile.base, platform) for profile in profiles if profile is not None]
    return reasons[0] if reasons and all(reasons) else ""


@lru_cache(maxsize=16)
def _refused_base(base: str, platform: str) -> str:
    path = stock_folder() / base
    source = host.source_of("vllm_omni.config.stage_config")
    if platform not in ("npu", "xpu") or not path.is_file() or source is None or _RUNNER not in source[0]:
        return ""
    refused = runs_v2(merged(read_chain(path)), platform)
    return f"the host refuses its own {base} on {platform}: {_RUNNER} {platform.upper()}" if refused else ""


def _host_platforms() -> list[str]:
    """Names of the platforms that the host has a package for, and ``cpu``, which is vLLM's own; none without a host."""
    location = host.host_info().location
    if location is None:
        return []
    return sorted({"cpu", *(path.parent.name for path in (location / "platforms").glob("*/platform.py"))})


def _other_platform(name: str, platform: str | None) -> Notice:
    known = _host_platforms()
    if known and name not in known:
        near = difflib.get_close_matches(name.lower(), known, 1, _NEAR_MISS)
        meant = f'; did you mean "{near[0]}"?' if near else "."
        text = f'the host has no platform "{name}"{meant} It has {", ".join(known)}. This start is on {platform}.'
        return Notice("warning", text)
    return Notice("hint", f"it is for a start on {name}, and this one is on {platform}.")


def _notices(readings: Sequence[Reading], platform: str | None, pipeline: str | None) -> Iterator[Notice]:
    profile = profile_of(pipeline)
    acting = profile.stages() if profile is not None else frozenset()
    if profile is None and pipeline is not None:
        yield Notice("hint", f"no item of {BLOCK} is known to act in the pipeline {pipeline}.")
    for reading in readings:
        block = reading.block
        if block.section not in (None, platform):
            notice = _other_platform(str(block.section), platform)
            yield Notice(notice.level, f"{block.where}: {notice.text}")
            if notice.level == "warning":
                continue
        elif reading.instead is not None and isinstance(reading.instead.value, Mapping):
            # true and false speak for every item; a mapping leaves some to the block that is no longer there.
            yield Notice(
                "warning", f"{block.where}: {reading.instead.where} is read instead of it, whole and not item by item."
            )
            continue
        reached = reading.stages or {stage for stage in (block.stage,) if stage is not None}
        if profile is not None and reached and not reached & acting:
            numbers, only = (" and ".join(f"stage {one}" for one in sorted(some)) for some in (reached, acting))
            yield Notice("warning", f"{block.where}: no item acts in {numbers} of {profile.family}, only in {only}.")
