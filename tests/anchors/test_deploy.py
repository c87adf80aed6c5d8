# SPDX-License-Identifier: Apache-2.0
"""The hook on the host's config builder, through the host's own loaders."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_omni.config import stage_config
from vllm_omni.config.omni_config import VllmOmniConfig
from vllm_omni.model_executor.models.minicpmo_4_5.pipeline import MINICPMO_4_5_PIPELINE

from omni_speech_accel import environment, plugin
from omni_speech_accel.anchors import deploy as deploy_config
from omni_speech_accel.anchors.explain import explain
from omni_speech_accel.plugin import binding
from omni_speech_accel.plugin.settings import BLOCK, SettingsError
from tests.host_config import DEPLOY, SHM, build, stock, write


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(environment.KILL_SWITCH, raising=False)
    before = plugin.is_registered()
    plugin.register()
    yield
    if not before:
        plugin.unregister()


def test_minicpmo_with_a_block_is_stock(npu: None, tmp_path: Path) -> None:
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml", connectors={SHM: {"extra": {BLOCK: True}}})
    assert repr(build(path, MINICPMO_4_5_PIPELINE)) == repr(stock(path, MINICPMO_4_5_PIPELINE))


@pytest.mark.parametrize(
    ("connectors", "words"),
    [
        ({SHM: {"extra": {BLOCK: {"s3_grap": True}}}}, "did you mean"),
        ({"typo": {"name": "SharedMemoryConnector", "extra": {BLOCK: True}}}, "no stage of this deploy uses"),
    ],
)
def test_a_wrong_block_is_named_by_its_file_where_the_server_hands_in_file_and_object(
    npu: None, tmp_path: Path, connectors: dict[str, Any], words: str
) -> None:
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml", connectors=connectors)
    with pytest.raises(SettingsError, match=words) as raised:
        build(path, MINICPMO_4_5_PIPELINE, user_deploy_config=stage_config.load_deploy_config(path))
    assert f"{path}: connectors." in str(raised.value)


def test_fault_of_ours_is_logged_and_the_host_starts(
    npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml")
    wanted = repr(stock(path, MINICPMO_4_5_PIPELINE))

    def fail(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(deploy_config, "_load", fail)
    logger = logging.getLogger("vllm.omni_speech_accel")
    logger.addHandler(caplog.handler)
    try:
        assert repr(build(path, MINICPMO_4_5_PIPELINE)) == wanted
    finally:
        logger.removeHandler(caplog.handler)
    assert "a fault of ours" in caplog.text


def test_unregister_gives_the_hosts_classmethod_back() -> None:
    plugin.unregister()
    original = vars(VllmOmniConfig)["from_pipeline_config"]
    assert isinstance(original, classmethod)
    plugin.register()
    assert any(record.attribute == "from_pipeline_config" for record in binding.bound())
    assert vars(VllmOmniConfig)["from_pipeline_config"] is not original
    plugin.unregister()
    assert vars(VllmOmniConfig)["from_pipeline_config"] is original


def test_subclass_builds_its_own_class_through_the_wrapper(tmp_path: Path) -> None:
    class Mine(VllmOmniConfig):  # type: ignore[misc, valid-type]
        pass

    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml")
    config = Mine.from_pipeline_config(
        MINICPMO_4_5_PIPELINE, deploy_config_path=str(path), cli_overrides={"model": "none"}
    )
    assert type(config) is Mine


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"stages": [{"stage_id": 2, "additional_config": {BLOCK: {"speaker_grph": True}}}]},
            'stages[2].additional_config.omni_speech_accel.speaker_grph: unknown item; did you mean "speaker_graph"?',
        ),
        ({"connectors": {SHM: {"extra": {BLOCK: {"s3_graph": {"max_graphs": -1}}}}}}, "s3_graph.max_graphs"),
        ({"connectors": {SHM: {"extra": {BLOCK: "maybe"}}}}, "takes true, false or a mapping of items"),
        ({BLOCK: True}, "the host ignores the key here"),
        ({"edges": [{BLOCK: True}]}, "edges[0].omni_speech_accel: the host ignores"),
        ({"platforms": {"npu": {BLOCK: True}}}, "platforms.npu.omni_speech_accel: the host ignores"),
        ({"platforms": {"cuda": {"stages": [{"stage_id": 2, BLOCK: True}]}}}, "the host rejects the key here"),
        (
            {"connectors": {"unused": {"name": "SharedMemoryConnector", "extra": {BLOCK: True}}}},
            "connectors.unused.extra.omni_speech_accel: no stage of this deploy uses the connector",
        ),
        (
            {"platforms": {"npu": {"stages": [{"stage_id": 9, "additional_config": {BLOCK: True}}]}}},
            "the deploy has no stage 9",
        ),
        ({"stages": [{"stage_id": 9, "additional_config": {BLOCK: True}}]}, "the deploy has no stage 9"),
        ({"connectors": {SHM: {"extra": {"omni_speech_acel": True}}}}, 'did you mean "omni_speech_accel"?'),
    ],
)
@pytest.mark.parametrize("name", ["npu", "cpu"])
def test_wrong_block_stops_the_start(
    seen_as: Any, tmp_path: Path, content: dict[str, Any], message: str, name: str
) -> None:
    seen_as(name)
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml", **content)
    with pytest.raises(SettingsError) as caught:
        build(path, MINICPMO_4_5_PIPELINE)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert explain(path, platform=name).error == str(caught.value)


def test_block_that_the_hosts_npu_block_replaces_stops_the_start_there_alone(seen_as: Any, tmp_path: Path) -> None:
    stage = {"stage_id": 2, "additional_config": {BLOCK: True}}
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml", stages=[stage])
    seen_as("cpu")
    config = build(path, MINICPMO_4_5_PIPELINE)
    assert config.stage_by_id(2).runtime_config.additional_config == {BLOCK: True}
    seen_as("npu")
    assert BLOCK not in stock(path, MINICPMO_4_5_PIPELINE).stage_by_id(2).runtime_config.additional_config
    with pytest.raises(SettingsError, match=r"platforms\.npu\.stages\[2\]\.additional_config replaces"):
        build(path, MINICPMO_4_5_PIPELINE)


def test_wrong_block_on_the_command_line_stops_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml")
    cli = {"stage_2_additional_config": {BLOCK: {"speaker_grph": True}}}
    with pytest.raises(SettingsError, match=r"--stage-2-additional-config\.omni_speech_accel\.speaker_grph"):
        build(path, MINICPMO_4_5_PIPELINE, cli=cli)


def test_wrong_block_in_a_callers_object_stops_the_start() -> None:
    deploy = stage_config.load_deploy_config(DEPLOY / "minicpmo_4_5.yaml")
    deploy.connectors[SHM]["extra"][BLOCK] = {"speaker_grph": True}
    for path in (None, DEPLOY / "minicpmo_4_5.yaml"):
        with pytest.raises(SettingsError, match="speaker_grph"):
            build(path, MINICPMO_4_5_PIPELINE, user_deploy_config=deploy)


@pytest.mark.slow
def test_connector_extra_is_the_one_that_the_host_hands_out() -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("the host's engine modules need torchvision")
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config
    from vllm_omni.engine.stage_init_utils import get_stage_connector_spec

    for name in ("minicpmo_4_5.yaml", "step_audio_2.yaml", "fish_omni.yaml"):
        if not (DEPLOY / name).is_file():
            continue
        transfer = load_omni_transfer_config(config_dict=stage_config.resolve_deploy_yaml(DEPLOY / name))
        deploy = stage_config.load_deploy_config(DEPLOY / name)
        for stage in deploy.stages:
            theirs = dict(get_stage_connector_spec(transfer, stage.stage_id, True).get("extra", {}))
            ours = dict(deploy_config._connector_extra(deploy, stage.stage_id))
            theirs.pop("role", None)  # added for a sender
            assert ours.pop("wakeup_scope", None) is None or theirs.pop("wakeup_scope")  # random on every load
            assert ours == theirs


def test_a_host_without_the_known_yaml_reader_starts_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accel_log: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "my.yaml", DEPLOY / "minicpmo_4_5.yaml", connectors={SHM: {"extra": {BLOCK: "${x}"}}}, x=1)
    monkeypatch.setattr(deploy_config, "host_reader", lambda: None)
    assert build(path, MINICPMO_4_5_PIPELINE) is not None
    assert "keeps its YAML reader elsewhere" in accel_log.text
