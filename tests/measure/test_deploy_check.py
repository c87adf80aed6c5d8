# SPDX-License-Identifier: Apache-2.0
"""The verdict on the graph override, from what the host's loaders make of the two overlays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omni_speech_accel.anchors.explain import DeployReport
from omni_speech_accel.items.fish_omni_full_graph import KEY, GraphReport
from omni_speech_accel.measure import deploy_check
from omni_speech_accel.measure.checks import CHECKS
from omni_speech_accel.measure.deploy_check import check_full_graph
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.measure.workbench import Workbench

ON = GraphReport("fish_omni", "npu", True, True, "", "PIECEWISE", "FULL_AND_PIECEWISE", None, (1, 2, 8), 8)
OFF = GraphReport("fish_omni", "npu", False, False, "off")
BENCH = Workbench(Path("unused"), "npu", StageProfile("test"))


def judge(monkeypatch: pytest.MonkeyPatch, on: GraphReport | None, off: GraphReport = OFF, refusal: str = ""):  # type: ignore[no-untyped-def]
    reports = {True: on, False: off}

    def judged(profile: object, items: dict[str, bool]) -> DeployReport:
        return DeployReport("overlay.yaml", "fish_omni", "npu", graphs=reports[items[KEY]], refusal=refusal, error="")

    monkeypatch.setattr(deploy_check, "judged_overlay", judged)
    return check_full_graph(BENCH, KEY, CHECKS[KEY])


def test_full_graphs_up_to_max_num_seqs_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = judge(monkeypatch, ON)
    assert [one.ok for one in outcome.differences] == [True, True, True]


@pytest.mark.parametrize(
    ("on", "off", "words"),
    [
        (replace(ON, mode_after="PIECEWISE"), OFF, "is PIECEWISE, not FULL_AND_PIECEWISE"),
        (replace(ON, sizes_after=(1, 2, 4)), OFF, "lack max_num_seqs 8"),
        (ON, ON, "changed with the item off"),
    ],
)
def test_another_mode_missing_size_or_a_change_with_the_item_off_fails(
    monkeypatch: pytest.MonkeyPatch, on: GraphReport, off: GraphReport, words: str
) -> None:
    (wrong,) = [one for one in judge(monkeypatch, on, off).differences if not one.ok]
    assert words in wrong.problem


def test_a_deploy_that_the_host_refuses_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = judge(monkeypatch, ON, refusal="Runner V2 on NPU")
    assert (outcome.differences, outcome.host_native) == ((), True)
    assert outcome.refused.endswith("Runner V2 on NPU")


def test_an_item_that_finds_nothing_to_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(monkeypatch, replace(ON, applied=False, reason="set by the user")).refused == "set by the user"
    assert judge(monkeypatch, None).refused == "the host did not judge the deploy"
