# SPDX-License-Identifier: Apache-2.0
"""The fish_omni graph override and the deploy checks, through the host's own loaders, the platform seen as NPU."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_omni.config import omni_config, stage_config
from vllm_omni.config.omni_config import VllmOmniConfig

from omni_speech_accel import environment, plugin
from omni_speech_accel.anchors import deploy as deploy_config
from omni_speech_accel.anchors.explain import explain
from omni_speech_accel.host import source as host
from omni_speech_accel.items.fish_omni_full_graph import capture_sizes, default_sizes
from omni_speech_accel.plugin.settings import BLOCK
from tests.host_config import DEPLOY, SHM, build, fish, stock, write

HAS_FISH = (DEPLOY / "fish_omni.yaml").is_file()
needs_fish = pytest.mark.skipif(not HAS_FISH, reason="this host has no fish_omni; its reason is tested below")
ON: dict[str, Any] = {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": True}}}}
STOCK_TO_128 = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128]
TO_64 = STOCK_TO_128[:11]
RUNNER = {"model_runner": "v1"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(environment.KILL_SWITCH, raising=False)
    before = plugin.is_registered()
    plugin.register()
    yield
    if not before:
        plugin.unregister()


@pytest.fixture
def block_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose own fish_omni.yaml carries an NPU block that asks for PIECEWISE, with 64 streams."""
    folder = tmp_path / "host" / "deploy"
    folder.mkdir(parents=True)
    content = yaml.safe_load((DEPLOY / "fish_omni.yaml").read_text())
    entry = {"stage_id": 0, "max_num_seqs": 64, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    content["platforms"]["npu"] = {**RUNNER, "stages": [entry]}
    (folder / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(omni_config, "_DEPLOY_DIR", folder)
    return folder


def overlay(tmp_path: Path, base: Path = DEPLOY / "fish_omni.yaml", **content: Any) -> Path:
    """An overlay with the item on. On the installed host, stage 0 runs the runner that NPU allows."""
    if base.parent == DEPLOY:
        content.setdefault("platforms", {"npu": dict(RUNNER)})
    return write(tmp_path / "my.yaml", base, **{"connectors": ON, **content})


def graphs(config: Any, stage: int = 0) -> tuple[str | None, list[int] | None, int | None]:
    compilation = config.stage_by_id(stage).compilation_config
    if compilation is None:
        return None, None, None
    mode = compilation.cudagraph_mode
    return (
        mode.name if mode is not None else None,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
    )


# The override


@needs_fish
def test_installed_deploy_gets_full_graphs_up_to_max_num_seqs(npu: None, tmp_path: Path) -> None:
    path = overlay(tmp_path)
    assert len(graphs(stock(path))[1] or ()) == 39
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", STOCK_TO_128, 128)


@needs_fish
def test_npu_block_of_the_host_that_asks_for_piecewise_is_overridden(
    npu: None, block_host: Path, tmp_path: Path
) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert graphs(stock(path))[0] == "PIECEWISE"
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
def test_default_deploy_without_a_file_of_the_users(npu: None, block_host: Path) -> None:
    cli = {"stage_0_additional_config": {BLOCK: True}}
    config = build(None, cli=cli)
    assert graphs(config) == ("FULL_AND_PIECEWISE", TO_64, 64)
    assert config.orchestrator_config.deploy_config_path == str(block_host / "fish_omni.yaml")


@needs_fish
def test_block_at_the_stage_works_as_well(npu: None, block_host: Path, tmp_path: Path) -> None:
    stage = {"stage_id": 0, "additional_config": {BLOCK: {"fish_omni_full_graph": True}}}
    path = overlay(tmp_path, block_host / "fish_omni.yaml", connectors={}, stages=[stage])
    assert graphs(build(path))[0] == "FULL_AND_PIECEWISE"


@needs_fish
def test_block_in_a_base_two_levels_down(npu: None, block_host: Path, tmp_path: Path) -> None:
    mid = write(tmp_path / "mid.yaml", block_host / "fish_omni.yaml", connectors=ON)
    top = write(tmp_path / "top.yaml", mid, stages=[{"stage_id": 0, "max_num_seqs": 16}])
    # The host's platform block sets 64 streams and wins over the overlay's stages[].
    assert graphs(build(top)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
def test_upper_overlay_turns_the_item_of_the_lower_one_off(npu: None, block_host: Path, tmp_path: Path) -> None:
    mid = write(tmp_path / "mid.yaml", block_host / "fish_omni.yaml", connectors=ON)
    off = {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": False}}}}
    top = write(tmp_path / "top.yaml", mid, connectors=off)
    assert graphs(build(top))[0] == "PIECEWISE"


@needs_fish
@pytest.mark.parametrize("key", ["max_num_seqs", "stage_0_max_num_seqs"])
def test_sizes_follow_max_num_seqs_of_the_command_line(npu: None, block_host: Path, tmp_path: Path, key: str) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert graphs(build(path, cli={key: 20})) == ("FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 20], 20)


@needs_fish
def test_larger_piecewise_sizes_are_kept_where_asked(npu: None, tmp_path: Path) -> None:
    options = {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": {"keep_piecewise_above": True}}}}}
    path = overlay(tmp_path, connectors=options)
    listed = graphs(stock(path))[1]
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", listed, 4096)


@needs_fish
def test_rest_of_the_compilation_config_is_kept(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    content["platforms"]["npu"]["stages"][0]["compilation_config"]["cudagraph_num_of_warmups"] = 3
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    config = build(overlay(tmp_path, block_host / "fish_omni.yaml"))
    assert config.stage_by_id(0).compilation_config.cudagraph_num_of_warmups == 3
    assert graphs(config)[0] == "FULL_AND_PIECEWISE"


@needs_fish
@pytest.mark.parametrize("layout", ["engine_args", "engine_extras"])
def test_nested_layouts_of_the_hosts_platform_block(npu: None, block_host: Path, tmp_path: Path, layout: str) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    entry = content["platforms"]["npu"]["stages"][0]
    nested = {"compilation_config": entry.pop("compilation_config")}
    if layout == "engine_args":
        nested["max_num_seqs"] = entry.pop("max_num_seqs")
    entry[layout] = nested
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert graphs(stock(path))[0] == "PIECEWISE"
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
def test_graph_settings_in_the_hosts_stage_extras(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    del content["platforms"]["npu"]["stages"][0]["compilation_config"]
    content["stages"][0]["engine_extras"] = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert graphs(stock(path))[0] == "PIECEWISE"
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
def test_host_that_asks_for_the_same_is_left_alone(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    content["platforms"]["npu"]["stages"][0]["compilation_config"] = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": TO_64,
    }
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    report = explain(overlay(tmp_path, block_host / "fish_omni.yaml"), platform="npu").graphs
    assert report is not None
    assert not report.applied
    assert report.satisfied
    assert "nothing to change: the host's deploy asks for the same already" in report.line()


@needs_fish
def test_host_that_runs_the_stage_eager_is_left_alone(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    content["platforms"]["npu"]["stages"][0]["enforce_eager"] = True
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert repr(build(path)) == repr(stock(path))


# The user's own setting wins


@needs_fish
@pytest.mark.parametrize(
    "setting",
    [
        {"platforms": {"npu": {"stages": [{"stage_id": 0, "compilation_config": {"cudagraph_mode": "NONE"}}]}}},
        {"stages": [{"stage_id": 0, "compilation_config": {"cudagraph_mode": "NONE"}}]},
        {"stages": [{"stage_id": 0, "engine_args": {"compilation_config": {"cudagraph_mode": "NONE"}}}]},
    ],
    ids=["platform", "stage", "engine_args"],
)
@pytest.mark.parametrize("level", ["top", "mid"])
def test_mode_in_the_users_files_wins_and_its_file_is_named(
    npu: None, block_host: Path, tmp_path: Path, setting: dict[str, Any], level: str
) -> None:
    mid = write(tmp_path / "mid.yaml", block_host / "fish_omni.yaml", **(setting if level == "mid" else {}))
    top = write(tmp_path / "top.yaml", mid, connectors=ON, **(setting if level == "top" else {}))
    assert graphs(build(top))[0] == "NONE"
    report = explain(top, platform="npu").graphs
    assert report is not None
    assert not report.applied
    assert str(tmp_path / f"{level}.yaml") in report.user_settings[0]
    assert report.user_settings[0] in report.reason
    assert report.mode_after == "NONE"


@needs_fish
@pytest.mark.parametrize(
    "cli",
    [
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {"stage_0_compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {"enforce_eager": True},
        {"stage_0_enforce_eager": True},
        {"max_cudagraph_capture_size": 32},
        {"stage_0_max_cudagraph_capture_size": 32},
    ],
    ids=lambda cli: next(iter(cli)),
)
def test_command_line_wins_and_is_named(npu: None, block_host: Path, tmp_path: Path, cli: dict[str, Any]) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert repr(build(path, cli=cli)) == repr(stock(path, cli=cli))
    report = explain(path, platform="npu", cli_overrides=cli).graphs
    assert report is not None
    assert report.user_settings == (f"--{next(iter(cli)).replace('_', '-')}",)


@needs_fish
@pytest.mark.parametrize(
    "cli",
    [
        {"stage_1_compilation_config": {"cudagraph_mode": "NONE"}},
        {"stage_1_enforce_eager": True},
        {"stage_0_enforce_eager": None},
        {"stage_0_enforce_eager": False},
        {"gpu_memory_utilization": 0.5},
    ],
    ids=lambda cli: next(iter(cli)),
)
def test_command_line_that_leaves_the_graphs_open_does_not_stop_the_item(
    npu: None, block_host: Path, tmp_path: Path, cli: dict[str, Any]
) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert graphs(build(path, cli=cli)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
def test_setting_for_another_platform_or_stage_does_not_stop_the_item(
    npu: None, block_host: Path, tmp_path: Path
) -> None:
    none = {"compilation_config": {"cudagraph_mode": "NONE"}}
    path = overlay(
        tmp_path,
        block_host / "fish_omni.yaml",
        platforms={"cuda": {"stages": [{"stage_id": 0, **none}]}},
        stages=[{"stage_id": 1, **none}],
    )
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", TO_64, 64)
    assert graphs(build(path), 1)[0] == "NONE"


@needs_fish
def test_setting_in_a_config_object_without_a_file_is_the_callers(npu: None, block_host: Path) -> None:
    deploy = stage_config.load_deploy_config(block_host / "fish_omni.yaml")
    deploy.connectors[SHM]["extra"][BLOCK] = True
    assert graphs(build(None, user_deploy_config=deploy)) == ("FULL_AND_PIECEWISE", TO_64, 64)
    deploy.platforms["npu"]["stages"][0]["compilation_config"] = {"cudagraph_mode": "NONE"}
    assert graphs(build(None, user_deploy_config=deploy))[0] == "NONE"


@needs_fish
@pytest.mark.parametrize("where", ["stage", "platform", "extras"])
def test_callers_object_wins_over_the_path_that_it_came_from(
    npu: None, block_host: Path, tmp_path: Path, where: str
) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    deploy = stage_config.load_deploy_config(path)
    none = {"compilation_config": {"cudagraph_mode": "NONE"}}
    if where == "platform":
        deploy.platforms["npu"]["stages"][0].update(none)
    elif where == "stage":
        deploy.stages[0].compilation_config = none["compilation_config"]
    else:
        deploy.stages[0].engine_extras.update(none)
    assert graphs(build(path, user_deploy_config=deploy))[0] == "NONE"


@needs_fish
def test_callers_object_that_takes_a_files_choice_back_lets_the_item_act(
    npu: None, block_host: Path, tmp_path: Path
) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml", stages=[{"stage_id": 0, "enforce_eager": True}])
    deploy = stage_config.load_deploy_config(path)
    deploy.stages[0].enforce_eager = False
    assert graphs(build(path, user_deploy_config=deploy)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
def test_choice_that_a_higher_file_or_the_command_line_takes_back_is_none(
    npu: None, block_host: Path, tmp_path: Path
) -> None:
    full = ("FULL_AND_PIECEWISE", TO_64, 64)
    low = write(tmp_path / "low.yaml", block_host / "fish_omni.yaml", stages=[{"stage_id": 0, "enforce_eager": True}])
    assert graphs(build(overlay(tmp_path, low)))[0] == "PIECEWISE"
    assert graphs(build(overlay(tmp_path, low), cli={"enforce_eager": False})) == full
    top = overlay(tmp_path, low, stages=[{"stage_id": 0, "enforce_eager": False}])
    assert graphs(build(top)) == full


@needs_fish
def test_command_line_takes_the_hosts_eager_back(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    content["platforms"]["npu"]["stages"][0]["enforce_eager"] = True
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert graphs(build(path, cli={"stage_0_enforce_eager": False})) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
@pytest.mark.parametrize(
    "setting",
    [
        {"engine_args": {"max_num_seqs": 64}, "enforce_eager": True},
        {"engine_args": {"max_num_seqs": 64}, "compilation_config": {"cudagraph_mode": "NONE"}},
        {"compilation_config": None},
        {"enforce_eager": None},
        {"enforce_eager": "false"},
        {"enforce_eager": "${oc.env:EAGER}"},
    ],
    ids=["eager beside engine_args", "config beside engine_args", "null config", "null eager", "text", "environment"],
)
def test_setting_that_the_host_reads_as_none_is_no_choice(
    npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    monkeypatch.setenv("EAGER", "false")
    entry = {"stage_id": 0, "max_num_seqs": 64, **setting}
    path = overlay(tmp_path, platforms={"npu": {**RUNNER, "stages": [entry]}})
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
def test_flat_key_beside_the_hosts_engine_args_is_no_choice(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    content["platforms"]["npu"]["stages"] = [{"stage_id": 0, "engine_args": {"max_num_seqs": 64}}]
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    flat = {"npu": {"stages": [{"stage_id": 0, "compilation_config": {"cudagraph_mode": "NONE"}}]}}
    path = overlay(tmp_path, block_host / "fish_omni.yaml", platforms=flat)
    assert graphs(stock(path))[0] == "FULL_AND_PIECEWISE"
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", TO_64, 64)


@needs_fish
@pytest.mark.parametrize("place", ["stage", "platform"])
@pytest.mark.parametrize(
    "setting",
    [
        {"engine_extras": {"max_num_seqs": 16}},
        {"max_num_seqs": "16"},
        {"max_num_seqs": 16.0},
        {"max_num_seqs": "${oc.env:STREAMS}"},
    ],
    ids=["extras", "text", "float", "environment"],
)
def test_streams_are_read_as_the_host_reads_them(
    npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, setting: dict[str, Any]
) -> None:
    monkeypatch.setenv("STREAMS", "16")
    stages = [{"stage_id": 0, **setting}]
    content: dict[str, Any] = {"platforms": {"npu": dict(RUNNER)}}
    (content if place == "stage" else content["platforms"]["npu"])["stages"] = stages
    path = overlay(tmp_path, **content)
    config = build(path)
    assert config.stage_by_id(0).scheduler_config.max_num_seqs == 16
    assert graphs(config) == ("FULL_AND_PIECEWISE", [1, 2, 4, 8, 16], 16)


@needs_fish
def test_kept_sizes_never_exceed_the_token_budget(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    host_stage = content["platforms"]["npu"]["stages"][0]
    host_stage["compilation_config"]["cudagraph_capture_sizes"] = [1, 2, 4, 64, 2048, 4096]
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    keep = {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": {"keep_piecewise_above": True}}}}}
    stages = [{"stage_id": 0, "max_num_batched_tokens": 2048}]
    path = overlay(tmp_path, block_host / "fish_omni.yaml", connectors=keep, stages=stages)
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", [1, 2, 4, 64, 2048], 2048)
    path = overlay(
        tmp_path,
        block_host / "fish_omni.yaml",
        connectors=keep,
        stages=[{"stage_id": 0, "max_num_batched_tokens": None}],
    )
    assert graphs(build(path)) == ("FULL_AND_PIECEWISE", [1, 2, 4, 64, 2048, 4096], None)


@needs_fish
def test_kept_sizes_reach_the_hosts_own_ceiling(npu: None, block_host: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((block_host / "fish_omni.yaml").read_text())
    content["platforms"]["npu"]["stages"][0]["compilation_config"]["max_cudagraph_capture_size"] = 1024
    (block_host / "fish_omni.yaml").write_text(yaml.safe_dump(content))
    keep = {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": {"keep_piecewise_above": True}}}}}
    mode, sizes, largest = graphs(build(overlay(tmp_path, block_host / "fish_omni.yaml", connectors=keep)))
    assert (mode, tuple(sizes or ()), largest) == ("FULL_AND_PIECEWISE", default_sizes(1024), 1024)


# Stock stays stock


@needs_fish
@pytest.mark.parametrize(
    "connectors",
    [
        {},
        {SHM: {"extra": {BLOCK: False}}},
        {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": False}}}},
        {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": "false"}}}},
        {SHM: {"extra": {BLOCK: {"fish_omni_full_graph": {"enabled": False}}}}},
    ],
    ids=["no block", "block false", "item false", "item false as text", "enabled false"],
)
def test_item_off_is_stock(npu: None, block_host: Path, tmp_path: Path, connectors: dict[str, Any]) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml", connectors=connectors)
    assert repr(build(path)) == repr(stock(path))


@needs_fish
@pytest.mark.parametrize("name", ["cuda", "cpu", "rocm", "xpu"])
def test_other_platform_is_stock(seen_as: Any, tmp_path: Path, name: str) -> None:
    seen_as(name)
    path = overlay(tmp_path, platforms={name: dict(RUNNER)})
    assert repr(build(path)) == repr(stock(path))


@needs_fish
def test_other_stage_is_stock(npu: None, block_host: Path, tmp_path: Path) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert repr(build(path).stage_by_id(1)) == repr(stock(path).stage_by_id(1))


@needs_fish
def test_other_pipeline_over_the_same_deploy_is_stock(npu: None, block_host: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(fish(), model_type="another_model")
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    assert repr(build(path, other)) == repr(stock(path, other))


@needs_fish
def test_callers_deploy_config_is_not_changed(npu: None, block_host: Path, tmp_path: Path) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    deploy = stage_config.load_deploy_config(path)
    cli = {"model": "none", "stage_0_max_num_seqs": 32}
    before = copy.deepcopy(deploy), copy.deepcopy(cli), (block_host / "fish_omni.yaml").read_bytes()
    config = VllmOmniConfig.from_pipeline_config(
        fish(), user_deploy_config=deploy, deploy_config_path=str(path), cli_overrides=cli
    )
    assert graphs(config)[0] == "FULL_AND_PIECEWISE"
    assert (deploy, cli, (block_host / "fish_omni.yaml").read_bytes()) == before


@needs_fish
@pytest.mark.parametrize("users", [{}, {"stages": [{"stage_id": 0, "compilation_config": {"cudagraph_mode": "NONE"}}]}])
def test_plan_works_on_a_copy(npu: None, block_host: Path, tmp_path: Path, users: dict[str, Any]) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml", **users)
    deploy = deploy_config._load(fish(), None, str(path))
    before = copy.deepcopy(deploy.config)
    _, edited = deploy_config._graphs("fish_omni", deploy, "npu", {})
    assert edited is not None
    assert deploy.config == before != edited


@needs_fish
def test_kill_switch_is_stock(npu: None, block_host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    wanted = repr(stock(path))
    monkeypatch.setenv(environment.KILL_SWITCH, "0")
    assert repr(build(path)) == wanted


# Offline


_OFFLINE = """
import sys
import vllm_omni.platforms as platforms

real = platforms.current_omni_platform

class Npu:
    device_name = device_type = "npu"
    def __getattr__(self, name):
        return getattr(real, name)

vars(platforms)["current_omni_platform"] = Npu()
from vllm_omni.config.omni_config import VllmOmniConfig
from vllm_omni.model_executor.models.fish_omni.pipeline import FISH_OMNI_PIPELINE

def sizes():
    config = VllmOmniConfig.from_pipeline_config(
        FISH_OMNI_PIPELINE, deploy_config_path=sys.argv[1], cli_overrides={"model": "none"}
    )
    return len(config.stage_by_id(0).compilation_config.cudagraph_capture_sizes)

before = sizes()
from vllm.plugins import load_general_plugins
load_general_plugins()
print("SIZES", before, sizes())
"""


@needs_fish
def test_offline_caller_loads_the_plugins_first(tmp_path: Path) -> None:
    dist = tmp_path / "site" / "omni_speech_accel-0.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-speech-accel\nVersion: 0\n")
    (dist / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nomni_speech_accel = omni_speech_accel.plugin:register\n"
    )
    repo = Path(plugin.__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _OFFLINE, str(overlay(tmp_path))],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(repo)]),
            "VLLM_PLUGINS": "omni_speech_accel",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "SIZES 39 19" in done.stdout, done.stdout + done.stderr


# What status is told


@needs_fish
def test_explain_is_json_and_says_what_changes(block_host: Path, tmp_path: Path) -> None:
    path = overlay(tmp_path, block_host / "fish_omni.yaml")
    report = explain(path, platform="npu")
    data = json.loads(json.dumps(report.as_dict()))
    assert data["pipeline"] == "fish_omni"
    assert data["refusal"] == data["error"] == ""
    assert data["graphs"]["applied"]
    assert (data["graphs"]["mode_before"], data["graphs"]["mode_after"]) == ("PIECEWISE", "FULL_AND_PIECEWISE")
    assert data["graphs"]["sizes_after"] == TO_64
    assert "PIECEWISE -> FULL_AND_PIECEWISE, capture sizes vLLM's own -> 11 up to 64" in "\n".join(report.lines())


@needs_fish
def test_runner_that_npu_refuses_is_told_beforehand(npu: None, tmp_path: Path) -> None:
    path = write(tmp_path / "my.yaml", DEPLOY / "fish_omni.yaml", connectors=ON)
    report = explain(path, platform="npu")
    with pytest.raises(NotImplementedError) as caught:
        build(path)
    assert report.refusal == str(caught.value)
    assert "Model Runner V2" in report.refusal
    assert any("refuse" in line for line in report.lines())
    assert explain(path, platform="cuda").refusal == ""


@needs_fish
def test_explain_with_a_config_object_on_the_command_line(block_host: Path, tmp_path: Path) -> None:
    from vllm.config import CompilationConfig

    cli = {"compilation_config": CompilationConfig(cudagraph_mode="NONE")}
    report = explain(overlay(tmp_path, block_host / "fish_omni.yaml"), platform="npu", cli_overrides=cli).graphs
    assert report is not None
    assert (report.reason, report.mode_after) == ("the user's own setting wins (--compilation-config)", "NONE")


@needs_fish
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"connectors": {SHM: None}}, f"connectors.{SHM} must be a mapping, not None"),
        ({"stages": [{}]}, "stages[0] has no stage_id"),
        ({"platforms": {"npu": [1]}}, "platforms.npu must be a mapping, not [1]"),
    ],
)
def test_explain_of_a_deploy_of_the_wrong_shape_is_an_error_not_a_crash(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    block = {"stages": [{"stage_id": 0, "additional_config": {BLOCK: True}}]}
    assert words in explain(overlay(tmp_path, **{**block, **content}), platform="npu").error


@needs_fish
def test_explain_needs_no_file(npu: None) -> None:
    report = explain(pipeline="fish_omni", platform="npu")
    assert report.deploy == str(DEPLOY / "fish_omni.yaml")
    assert report.graphs is not None
    assert "no omni_speech_accel block" in report.graphs.reason


# Sizes


def test_default_grid_values() -> None:
    assert default_sizes(512)[:6] == (1, 2, 4, 8, 16, 24)
    assert default_sizes(512)[-2:] == (496, 512)
    assert 264 not in default_sizes(512)
    assert 272 in default_sizes(512)
    assert default_sizes(3) == (1, 2)


def test_default_grid_is_still_vllms() -> None:
    source = host.source_of("vllm.config.vllm")
    assert source is not None
    assert "range(8, min(max_cudagraph_capture_size + 1, 256), 8)" in source[0]
    assert "range(256, max_cudagraph_capture_size + 1, 16)" in source[0]
    assert "1024 if current_platform.is_device_capability_family(100) else 512" in source[0]


@pytest.mark.parametrize("streams", [1, 3, 5, 64, 100, 128, 300])
@pytest.mark.parametrize("listed", [None, (1, 2, 4, 8, 4096)])
@pytest.mark.parametrize("keep", [False, True])
def test_max_num_seqs_is_always_captured_and_caps_the_sizes(
    streams: int, listed: tuple[int, ...] | None, keep: bool
) -> None:
    sizes = capture_sizes(streams, listed, keep_above=keep)
    assert streams in sizes
    assert list(sizes) == sorted(set(sizes))
    assert keep or max(sizes) == streams
    if keep and listed is not None:
        assert max(sizes) == 4096


def test_a_full_step_is_captured_below_the_hosts_ceiling() -> None:
    sizes = capture_sizes(64, None, keep_above=True, max_size=1024, max_tokens=500)
    assert sizes[-2:] == (496, 500)


def test_kept_sizes_are_those_that_stock_would_capture() -> None:
    fallback = (1, 2, 4, 4096)
    assert max(capture_sizes(64, None, fallback, keep_above=True)) == 128
    assert max(capture_sizes(1000, None, fallback, keep_above=True)) == 1000
