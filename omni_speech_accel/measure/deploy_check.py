# SPDX-License-Identifier: Apache-2.0
"""The fish_omni graph override, through the host's own config builder with the block in the host's own deploy."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omni_speech_accel.deploy.overlay import render_overlay
from omni_speech_accel.deploy.profiles import Profile, profile_for
from omni_speech_accel.errors import Unavailable
from omni_speech_accel.host import source as host
from omni_speech_accel.measure.check import Check
from omni_speech_accel.measure.compare import Difference
from omni_speech_accel.measure.workbench import Outcome, Workbench

if TYPE_CHECKING:
    from omni_speech_accel.anchors.explain import DeployReport


def judged_overlay(profile: Profile, items: Mapping[str, bool]) -> DeployReport:
    """What the host makes of an overlay of ``profile`` over its own deploy file, on the profile's first platform.

    Raises:
        Unavailable: The host is not installed.
    """
    from omni_speech_accel.anchors.explain import explain

    location = host.host_info().location
    if location is None:
        raise Unavailable("vllm-omni is not installed here")
    with tempfile.TemporaryDirectory(prefix="omni-speech-accel-") as scratch:
        overlay = Path(scratch) / "overlay.yaml"
        base = str(location / "deploy" / profile.base)
        overlay.write_text(render_overlay(base, profile, items), encoding="utf-8")
        return explain(overlay, platform=profile.platforms[0])


def _expect(what: str, ok: bool, problem: str) -> Difference:
    return Difference(what, ok, 0.0, 0.0, 1.0, 0 if ok else 1, 1, "as documented", "" if ok else problem)


def check_full_graph(bench: Workbench, item: str, check: Check) -> Outcome:
    """On NPU the deploy's stage 0 is to decode from full graphs, and to stay stock with the item off."""
    del bench, check
    from omni_speech_accel.items.fish_omni_full_graph import MODE

    profile = profile_for("fish_omni_npu")
    on = judged_overlay(profile, {item: True})
    off = judged_overlay(profile, {item: False})
    if on.graphs is None or off.graphs is None:
        return Outcome(refused=on.error or "the host did not judge the deploy")
    if on.refusal:
        return Outcome(refused=f"the host refuses to start its own deploy: {on.refusal}", host_native=True)
    if not on.graphs.applied:
        return Outcome(refused=on.graphs.reason)
    return Outcome(
        (
            _expect("item on: graph mode", on.graphs.mode_after == MODE, f"is {on.graphs.mode_after}, not {MODE}"),
            _expect(
                "item on: largest capture size",
                bool(on.graphs.sizes_after) and on.graphs.max_num_seqs in (on.graphs.sizes_after or ()),
                f"sizes {on.graphs.sizes_after} lack max_num_seqs {on.graphs.max_num_seqs}",
            ),
            _expect("item off: stock", not off.graphs.applied, "the deploy is changed with the item off"),
        )
    )
