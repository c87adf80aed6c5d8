# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import yaml

from omni_speech_accel.errors import Unavailable, UsageError
from omni_speech_accel.host import source as host
from omni_speech_accel.measure import stage_profile as module
from omni_speech_accel.measure.stage_profile import stage_profile


def shipped() -> dict[str, object]:
    location = host.host_info().location
    assert location is not None
    loaded: dict[str, object] = yaml.safe_load((location / "deploy" / "minicpmo_4_5.yaml").read_text())
    return loaded


def test_cuda_profile_is_the_one_that_the_host_ships() -> None:
    found = stage_profile("cuda")
    connector = shipped()["connectors"]["connector_of_shared_memory"]  # type: ignore[index]
    assert found.extra == connector["extra"]
    assert found.extra["enable_cfm_graph"] is True
    stages = {stage["stage_id"]: stage for stage in shipped()["stages"]}  # type: ignore[attr-defined]
    assert found.max_num_seqs == stages[2]["max_num_seqs"]


def test_npu_profile_takes_the_platforms_stage_two_override() -> None:
    found = stage_profile("npu")
    assert found.additional_config["code2wav_enable_npu_graph"] is True


def test_overrides_replace_extra_keys_and_are_named() -> None:
    found = stage_profile("cuda", {"token2wav_n_timesteps": 3})
    assert found.extra["token2wav_n_timesteps"] == 3
    assert "token2wav_n_timesteps=3" in found.source
    assert found.extra["enable_cfm_graph"] is True


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_block_is_no_override_since_stock_would_have_it_too(platform: str) -> None:
    with pytest.raises(UsageError, match="the arms set it, stock has none"):
        stage_profile(platform, {"omni_speech_accel": True})


def test_reference_length_is_the_stages() -> None:
    assert stage_profile("cuda").reference_seconds == 6.0
    assert stage_profile("cpu", {"ref_audio_max_seconds": 4.0}).reference_seconds == 4.0


def test_a_host_without_the_deploy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPLOY", "no_such_model.yaml")
    with pytest.raises(Unavailable, match=r"no_such_model\.yaml"):
        stage_profile("cuda")
