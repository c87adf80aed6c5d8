# SPDX-License-Identifier: Apache-2.0
"""A rendered overlay, judged by the host's own config loaders."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omni_speech_accel.deploy.overlay import render_overlay
from omni_speech_accel.deploy.profiles import Profile
from omni_speech_accel.errors import BenchError
from omni_speech_accel.host import source as host

if TYPE_CHECKING:
    from omni_speech_accel.anchors.deploy import DeployReport

__all__ = ["judged_overlay"]


def judged_overlay(profile: Profile, items: Mapping[str, bool]) -> DeployReport:
    """What the host makes of an overlay of ``profile`` over its own deploy file, on the profile's first platform.

    Raises:
        BenchError: The host is not installed.
    """
    from omni_speech_accel.anchors.deploy import explain

    location = host.host_info().location
    if location is None:
        raise BenchError("vllm-omni is not installed here")
    with tempfile.TemporaryDirectory(prefix="omni-speech-accel-") as scratch:
        overlay = Path(scratch) / "overlay.yaml"
        base = str(location / "deploy" / profile.base)
        overlay.write_text(render_overlay(base, profile, items), encoding="utf-8")
        return explain(overlay, platform=profile.platforms[0])
