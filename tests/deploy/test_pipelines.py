# SPDX-License-Identifier: Apache-2.0
"""Which pipelines the host has, read off its files."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_omni.model_executor.models.minicpmo_4_5.pipeline import MINICPMO_4_5_PIPELINE

from omni_speech_accel.deploy.pipelines import host_pipelines
from omni_speech_accel.host import source as host


def test_pipelines_are_read_off_the_hosts_files() -> None:
    found = host_pipelines()["minicpmo_4_5"]
    assert found.default_deploy_config_name == MINICPMO_4_5_PIPELINE.default_deploy_config_name
    assert [stage.stage_id for stage in found.stages] == [stage.stage_id for stage in MINICPMO_4_5_PIPELINE.stages]


def test_a_pipeline_file_that_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    read = host.source_of

    def source_of(module: str) -> Any:
        if module == "vllm_omni.model_executor.models.fish_omni.pipeline":
            raise host.UnreadableSource("pipeline.py cannot be read")
        return read(module)

    host_pipelines.cache_clear()
    monkeypatch.setattr(host, "source_of", source_of)
    try:
        found = host_pipelines()
    finally:
        host_pipelines.cache_clear()
    assert "minicpmo_4_5" in found
    assert "fish_omni" not in found
