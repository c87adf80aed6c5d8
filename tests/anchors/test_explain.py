# SPDX-License-Identifier: Apache-2.0
"""What a deploy asks for, told by the host without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_speech_accel.anchors.explain import explain
from omni_speech_accel.plugin.settings import BLOCK
from tests.host_config import DEPLOY, SHM, write

HAS_FISH = (DEPLOY / "fish_omni.yaml").is_file()


@pytest.mark.skipif(HAS_FISH, reason="this host has fish_omni")
def test_host_without_the_pipeline_is_not_applied_with_the_reason() -> None:
    report = explain(pipeline="fish_omni", platform="npu")
    assert report.graphs is not None
    assert not report.graphs.applied
    assert "fish_omni" in report.graphs.reason
    assert "fish_omni" in report.error


def test_explain_reads_the_items_of_each_stage(tmp_path: Path) -> None:
    block = {BLOCK: {"speaker_device": False}}
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml", connectors={SHM: {"extra": block}})
    report = explain(path, platform="cuda")
    assert report.pipeline == "minicpmo_4_5"
    by_id = {stage.stage: stage for stage in report.stages}
    assert not by_id[0].present
    assert "speaker_device" in by_id[2].off
    assert "sync_free_prompt" in by_id[2].on
    assert by_id[1].on == by_id[2].on


def test_explain_of_a_missing_file_is_an_error_not_a_crash(tmp_path: Path) -> None:
    assert "nowhere.yaml" in explain(tmp_path / "nowhere.yaml", platform="npu").error
