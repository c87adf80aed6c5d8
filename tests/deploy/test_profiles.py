# SPDX-License-Identifier: Apache-2.0
"""configs/: made from the table, loaded by the host's own loaders, and read back at the stage."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from vllm_omni.config import stage_config
from vllm_omni.config.omni_config import VllmOmniConfig

from omni_speech_accel.deploy import overlay
from omni_speech_accel.deploy.overlay import render_overlay
from omni_speech_accel.deploy.profiles import PROFILES, Profile, profile_for, suggest_profile
from omni_speech_accel.plugin.session import settings_from_vllm_config
from omni_speech_accel.plugin.settings import BLOCK, SettingsError
from omni_speech_accel.plugin.table import PATCHES

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "configs"
DEPLOY = Path(stage_config._DEPLOY_DIR)
MODELS = "vllm_omni.model_executor.models"
# (config, module of its pipeline, the stage whose model the items act in)
CASES = [
    ("minicpmo_4_5_cuda", "minicpmo_4_5", "MINICPMO_4_5_PIPELINE", 2),
    ("minicpmo_4_5_cuda", "minicpmo_4_5", "MINICPMO_4_5_PIPELINE", 1),
    ("minicpmo_4_5_npu", "minicpmo_4_5", "MINICPMO_4_5_PIPELINE", 2),
    ("minicpmo_4_5_npu", "minicpmo_4_5", "MINICPMO_4_5_PIPELINE", 1),
    ("step_audio_2", "step_audio2", "STEP_AUDIO2_PIPELINE", 1),
    ("fish_omni_npu", "fish_omni", "FISH_OMNI_PIPELINE", 0),
]


@pytest.fixture(autouse=True)
def deploy_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_DEPLOY_DIR", str(DEPLOY))


def pipeline(model: str, name: str) -> Any:
    module = f"{MODELS}.{model}.pipeline"
    if not (DEPLOY.parent / "model_executor" / "models" / model).is_dir():
        pytest.skip(f"this host has no pipeline {model}")
    return getattr(importlib.import_module(module), name)


def worker_settings(path: Path, config: Any, stage: int) -> Any:
    """The settings as the stage's worker reads them: the connector from the file, the rest from the stage config."""
    from vllm_omni.distributed.omni_connectors import get_stage_connector_config, load_omni_transfer_config

    transfer = load_omni_transfer_config(config_dict=stage_config.resolve_deploy_yaml(path))
    received = [entry["spec"] for entry in get_stage_connector_config(transfer, stage).values()]
    sent = [{"extra": spec.extra} for (source, _), spec in transfer.connectors.items() if source == str(stage)]
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(stage_connector_config=(received + sent + [{"extra": {}}])[0]),
        additional_config=config.stage_by_id(stage).runtime_config.additional_config,
    )
    return settings_from_vllm_config(vllm_config)


@pytest.mark.parametrize(("name", "model", "constant", "stage"), CASES)
def test_config_reaches_the_stage(request: Any, name: str, model: str, constant: str, stage: int) -> None:
    if name.endswith("_npu"):
        request.getfixturevalue("npu")
    topology = pipeline(model, constant)
    path = CONFIGS / f"{name}.yaml"
    deploy = stage_config.load_deploy_config(path)
    if model == "fish_omni":
        deploy.platforms = {**deploy.platforms, "npu": {"model_runner": "v1"}}
    config = VllmOmniConfig.from_pipeline_config(
        topology, user_deploy_config=deploy, deploy_config_path=str(path), cli_overrides={"model": "none"}
    )
    settings = worker_settings(path, config, stage)
    assert settings.present
    items = profile_for(name).items()
    assert items
    assert all(settings.enabled(patch.key) == patch.default for patch in items)


def test_one_item_turned_off_is_off_at_the_stage(tmp_path: Path) -> None:
    text = render_overlay(
        str(DEPLOY / "minicpmo_4_5.yaml"),
        profile_for("minicpmo_4_5_cuda"),
        {"speaker_device": False, "s3_graph": {"max_graphs": 4}},
    )
    path = tmp_path / "my.yaml"
    path.write_text(text)
    config = VllmOmniConfig.from_pipeline_config(
        pipeline("minicpmo_4_5", "MINICPMO_4_5_PIPELINE"),
        deploy_config_path=str(path),
        cli_overrides={"model": "none"},
    )
    settings = worker_settings(path, config, 2)
    assert not settings.enabled("speaker_device")
    assert settings.enabled("sync_free_prompt")
    assert settings.options("s3_graph").max_graphs == 4


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.key)
def test_every_item_of_the_model_and_platform_is_listed(profile: Profile) -> None:
    content = yaml.safe_load((CONFIGS / f"{profile.key}.yaml").read_text())
    node: Any = content
    for part in profile.place:
        node = next(entry for entry in node if entry["stage_id"] == part) if isinstance(part, int) else node[part]
    expected = [
        patch.key
        for patch in PATCHES
        if profile.concerns(patch) and any(name in patch.platforms for name in profile.platforms)
    ]
    assert list(node[BLOCK]) == expected
    assert expected


def test_every_item_of_the_table_is_in_some_config() -> None:
    listed = {patch.key for profile in PROFILES for patch in profile.items()}
    assert listed == {patch.key for patch in PATCHES}


def test_overlay_refuses_an_unknown_item() -> None:
    with pytest.raises(SettingsError, match="speaker_graph"):
        render_overlay("x.yaml", PROFILES[0], {"speaker_grph": True})


def test_overlay_is_yaml_whatever_the_base_is_called(tmp_path: Path) -> None:
    base = 'odd: "name" #1.yaml'
    assert yaml.safe_load(render_overlay(base, PROFILES[0]))["base_config"] == base


@pytest.mark.parametrize(
    ("base", "platform", "key"),
    [
        ("minicpmo_4_5_2gpu.yaml", "cuda", "minicpmo_4_5_cuda"),
        ("/a/b/minicpmo_4_5.yaml", "npu", "minicpmo_4_5_npu"),
        ("step_audio_2_async_chunk.yaml", "npu", "step_audio_2"),
        ("fish_omni.yaml", "npu", "fish_omni_npu"),
    ],
)
def test_profile_is_found_by_the_name_of_the_base(base: str, platform: str, key: str) -> None:
    found = suggest_profile(base, platform)
    assert found is not None
    assert found.key == key


def test_no_profile_for_a_model_that_no_item_touches() -> None:
    assert suggest_profile("qwen3_tts.yaml", "cuda") is None
    assert suggest_profile("fish_omni.yaml", "cuda") is None


def test_comparison_arms_differ_in_the_mode_alone() -> None:
    full, piecewise = (
        yaml.safe_load((CONFIGS / f"fish_omni_npu_{arm}.yaml").read_text()) for arm in ("full", "piecewise")
    )
    modes = [
        arm["platforms"]["npu"]["stages"][0]["compilation_config"].pop("cudagraph_mode") for arm in (full, piecewise)
    ]
    assert modes == ["FULL_AND_PIECEWISE", "PIECEWISE"]
    assert full == piecewise


@pytest.mark.parametrize(("arm", "mode"), [("full", "FULL_AND_PIECEWISE"), ("piecewise", "PIECEWISE")])
def test_comparison_arm_reaches_the_stage(npu: None, arm: str, mode: str) -> None:
    topology = pipeline("fish_omni", "FISH_OMNI_PIPELINE")
    path = CONFIGS / f"fish_omni_npu_{arm}.yaml"
    deploy = stage_config.load_deploy_config(path)
    deploy.platforms["npu"]["model_runner"] = "v1"
    config = VllmOmniConfig.from_pipeline_config(
        topology, user_deploy_config=deploy, deploy_config_path=str(path), cli_overrides={"model": "none"}
    )
    stage = config.stage_by_id(0)
    assert stage.compilation_config.cudagraph_mode.name == mode
    assert stage.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert stage.scheduler_config.max_num_seqs == 64


def test_comparison_arm_is_refused_by_a_host_that_cannot_run_it(npu: None) -> None:
    topology = pipeline("fish_omni", "FISH_OMNI_PIPELINE")
    with pytest.raises(NotImplementedError, match="Model Runner V2"):
        VllmOmniConfig.from_pipeline_config(
            topology, deploy_config_path=str(CONFIGS / "fish_omni_npu_full.yaml"), cli_overrides={"model": "none"}
        )


def test_graph_mode_overlay_sets_streams_to_the_largest_size() -> None:
    entry = yaml.safe_load(overlay.render_graph_mode_overlay("x.yaml", "FULL", [8, 1]))["platforms"]["npu"]["stages"][0]
    assert entry["max_num_seqs"] == 8
    assert entry["compilation_config"]["cudagraph_capture_sizes"] == [1, 8]
