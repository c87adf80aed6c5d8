# SPDX-License-Identifier: Apache-2.0
"""The fish_omni graph override, through the host's own config builder with the block in the host's own deploy."""

from __future__ import annotations

from omni_speech_accel.measure.check import Check
from omni_speech_accel.measure.compare import Difference
from omni_speech_accel.measure.workbench import Outcome, Workbench

__all__ = ["check_full_graph"]


def _expect(what: str, ok: bool, problem: str) -> Difference:
    return Difference(what, ok, 0.0, 0.0, 1.0, 0 if ok else 1, 1, "as documented", "" if ok else problem)


def check_full_graph(bench: Workbench, item: str, check: Check) -> Outcome:
    """On NPU the deploy's stage 0 is to decode from full graphs, and to stay stock with the item off."""
    del bench, check
    from omni_speech_accel.deploy.profiles import profile_for
    from omni_speech_accel.items.fish_omni_full_graph import MODE
    from omni_speech_accel.measure.overlay import judged_overlay

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
