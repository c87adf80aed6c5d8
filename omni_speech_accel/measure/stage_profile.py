# SPDX-License-Identifier: Apache-2.0
"""The stage-2 configuration that a run uses: what the installed host ships for this device, or a small one for CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from omni_speech_accel.errors import Unavailable, UsageError
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.settings import BLOCK

DEPLOY = "minicpmo_4_5.yaml"
CODE2WAV_STAGE = 2


_CPU_EXTRA: Mapping[str, Any] = {
    "codec_chunk_frames": 10,
    "codec_left_context_frames": 3,
    "ref_audio_max_seconds": 2.0,
    "token2wav_n_timesteps": 2,
}


@dataclass(frozen=True)
class StageProfile:
    """What reaches the stage's model: connector ``extra``, ``additional_config`` and ``max_num_seqs``."""

    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    additional_config: Mapping[str, Any] = field(default_factory=dict)
    max_num_seqs: int = 8

    @property
    def chunk_frames(self) -> int:
        """New codec frames per payload (25 per second of audio)."""
        return int(self.extra.get("codec_chunk_frames", 25))

    @property
    def reference_seconds(self) -> float:
        """Length that the stage folds every reference to. Default: ``_REF_MAX_SECONDS`` of the host's Code2Wav."""
        return float(self.extra.get("ref_audio_max_seconds", 6.0))

    @property
    def context_frames(self) -> int:
        """Codec frames that each payload repeats from the one before."""
        return int(self.extra.get("codec_left_context_frames", 3))


def _stage(stages: Any, stage_id: int) -> Mapping[str, Any]:
    for stage in stages or ():
        if stage.get("stage_id") == stage_id:
            found: Mapping[str, Any] = stage
            return found
    return {}


def _shipped(platform: str) -> StageProfile:
    root = host.host_info().location
    path = root / "deploy" / DEPLOY if root is not None else Path(DEPLOY)
    if not path.is_file():
        raise Unavailable(f"the installed host ships no deploy/{DEPLOY}")
    deploy = yaml.safe_load(path.read_text(encoding="utf-8"))
    extra: dict[str, Any] = {}
    for connector in (deploy.get("connectors") or {}).values():
        extra.update(connector.get("extra") or {})
    base = _stage(deploy.get("stages"), CODE2WAV_STAGE)
    override = _stage((deploy.get("platforms") or {}).get(platform, {}).get("stages"), CODE2WAV_STAGE)
    merged = {**base, **override}
    return StageProfile(
        source=f"vllm-omni {host.host_info().version} deploy/{DEPLOY} ({platform})",
        extra=extra,
        additional_config=dict(merged.get("additional_config") or {}),
        max_num_seqs=int(merged.get("max_num_seqs", 8)),
    )


def stage_profile(platform: str, overrides: Mapping[str, Any] | None = None) -> StageProfile:
    """The profile for ``platform``; ``overrides`` are connector ``extra`` keys that replace the profile's.

    On CUDA and NPU it is the shipped one, so that what is measured is what people run. The CPU has no shipped profile;
    a small one keeps a run short, and says so in ``source``.

    Raises:
        Unavailable: The installed host ships no MiniCPM-o deploy YAML.
        UsageError: ``overrides`` holds a block of ours.
    """
    if platform == "cpu":
        profile = StageProfile(
            source=f"CPU: no graphs, {', '.join(f'{key}={value}' for key, value in _CPU_EXTRA.items())}",
            extra=_CPU_EXTRA,
        )
    else:
        profile = _shipped(platform)
    if not overrides:
        return profile
    if BLOCK in overrides:
        raise UsageError(f"{BLOCK} is no connector key here: the arms set it, stock has none")
    named = ", ".join(f"{key}={value}" for key, value in overrides.items())
    return StageProfile(
        source=f"{profile.source}; {named}",
        extra={**profile.extra, **overrides},
        additional_config=profile.additional_config,
        max_num_seqs=profile.max_num_seqs,
    )
