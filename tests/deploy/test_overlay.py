# SPDX-License-Identifier: Apache-2.0
"""`config` writes what `status` and the server accept, or says why it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from omni_speech_accel.cli.app import app
from omni_speech_accel.cli.status import NOT_APPLIED, Platform, collect
from omni_speech_accel.deploy.overlay import check_overlay, render_overlay, unavailable
from omni_speech_accel.deploy.profiles import profile_for
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin import fit as fit_module
from omni_speech_accel.plugin.settings import SettingsError
from omni_speech_accel.plugin.table import PATCHES

LOCATION = host.host_info().location
assert LOCATION is not None
DEPLOY = LOCATION / "deploy"
# fish_omni is left out: every host here refuses its own deploy on NPU.
BASES = sorted(path.name for name in ("minicpmo_4_5", "step_audio") for path in DEPLOY.glob(f"{name}*.yaml"))


def config(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments])


def item_lines(text: str, item: str) -> str:
    """The comment and the line of one item."""
    lines = text.splitlines()
    end = next(index for index, line in enumerate(lines) if line.strip().startswith(f"{item}:"))
    start = end
    while lines[start - 1].strip().startswith("#"):
        start -= 1
    return " ".join(line.strip(" #") for line in lines[start : end + 1])


@pytest.mark.parametrize("place", [(), ("--place", "additional_config")], ids=["usual", "stage"])
@pytest.mark.parametrize("platform", ["cuda", "npu", "cpu"])
@pytest.mark.parametrize("base", BASES)
def test_every_overlay_that_is_written_is_accepted(
    tmp_path: Path, base: str, platform: str, place: Sequence[str]
) -> None:
    result = config(base, "--platform", platform, *place)
    assert result.exit_code in (0, 2)
    if result.exit_code == 2:
        assert result.stdout == ""
        assert "asr" in base or "ci" in base or (platform == "npu" and place)
        return
    path = tmp_path / "my.yaml"
    path.write_text(result.stdout)
    found = collect(path, platform=Platform(platform, "test"))
    assert [item.key for item in found.items if item.explicit and item.state == NOT_APPLIED] == []
    assert [item.key for item in found.items if item.state == "on"] != []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step_audio_2_asr.yaml", "--platform", "cuda"), "step_audio_2_asr, in which no item acts"),
        (("step_audio_2_asr.yaml", "--profile", "step_audio_2"), "has no stage 1 (it has 0)"),
        (("step_audio_2.yaml", "--profile", "minicpmo_4_5_cuda"), "and profile minicpmo_4_5_cuda for MiniCPM-o 4.5"),
        (("minicpmo_4_5.yaml", "--place", "additional_config", "--stage", "99"), "has no stage 99 (it has 0, 1, 2)"),
        (("minicpmo_4_5.yaml", "--place", "additional_config", "--stage", "0"), "no item acts in stage 0"),
        (("minicpmo_4_5.yaml", "--stage", "2"), "--stage is the stage of --place additional_config"),
        (("step_audio_2.yaml", "--place", "connectors"), "has no connectors"),
    ],
)
def test_a_block_that_would_reach_nothing_is_exit_code_two(arguments: Sequence[str], words: str) -> None:
    result = config(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def own_base(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


ONE_STAGE = """
pipeline: minicpmo_4_5
connectors: {mine: {name: SharedMemoryConnector}}
stages:
  - {stage_id: 2, input_connectors: {from_stage_1: mine}, additional_config: {theirs: 1}}
platforms: {npu: {stages: [{stage_id: 2, additional_config: {theirs: 1}}]}}
"""


def test_a_block_that_the_platforms_section_would_replace_is_refused_with_the_way_out(tmp_path: Path) -> None:
    base = str(own_base(tmp_path, ONE_STAGE))
    arguments = (base, "--profile", "minicpmo_4_5_npu", "--platform", "npu")
    result = config(*arguments, "--place", "additional_config", "--stage", "2")
    assert result.exit_code == 2
    assert "on npu platforms.npu.stages[2].additional_config replaces the mapping" in result.stderr
    assert "leave --place out" in result.stderr


def test_what_the_base_has_beside_the_block_stays(tmp_path: Path) -> None:
    """The host replaces a stage's additional_config whole."""
    theirs = {"theirs": 1, "nested": {"a: b": [1, "two\n"], 3: None}}
    base = own_base(tmp_path, yaml.safe_dump({"stages": [{"stage_id": 1, "additional_config": theirs}]}))
    result = config(str(base), "--profile", "step_audio_2")
    assert result.exit_code == 0, result.stderr
    (stage,) = yaml.safe_load(result.stdout)["stages"]
    block = stage["additional_config"].pop("omni_speech_accel")
    assert "s3_graph" in block
    assert stage["additional_config"] == theirs


def test_a_connector_that_no_stage_uses_is_refused_with_the_way_out(tmp_path: Path) -> None:
    base = str(own_base(tmp_path, ONE_STAGE))
    result = config(base, "--profile", "minicpmo_4_5_cuda")
    assert result.exit_code == 2
    assert "no stage of this deploy uses the connector" in result.stderr
    assert "use --place additional_config" in result.stderr


def test_a_connector_of_other_stages_is_refused(tmp_path: Path) -> None:
    base = own_base(
        tmp_path,
        "connectors: {connector_of_shared_memory: {name: SharedMemoryConnector}, mine: {name: SharedMemoryConnector}}\n"
        "stages:\n"
        "  - {stage_id: 0, output_connectors: {to_stage_3: connector_of_shared_memory}}\n"
        "  - {stage_id: 1, output_connectors: {to_stage_2: mine}}\n"
        "  - {stage_id: 2, input_connectors: {from_stage_1: mine}}\n"
        "  - {stage_id: 3, input_connectors: {from_stage_0: connector_of_shared_memory}}\n",
    )
    profile = profile_for("minicpmo_4_5_cuda")
    with pytest.raises(SettingsError, match="reaches no stage in which an item acts"):
        check_overlay(render_overlay(str(base), profile), str(base), profile, asked=True)


def test_a_pipeline_of_the_users_own_is_taken_where_the_profile_is_named(tmp_path: Path) -> None:
    text = (DEPLOY / "minicpmo_4_5.yaml").read_text().replace("pipeline: minicpmo_4_5", "pipeline: theirs")
    base = tmp_path / "minicpmo_4_5_mine.yaml"
    base.write_text(text)
    assert config(str(base), "--platform", "cuda").exit_code == 2
    assert config(str(base), "--platform", "cuda", "--profile", "minicpmo_4_5_cuda").exit_code == 0


def test_an_item_that_the_host_cannot_have_is_off_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fit_module.fit

    def fit(patch: Any) -> fit_module.Fit:
        return fit_module.Fit(False, "the host has no such thing") if patch.key == "s3_graph" else real(patch)

    monkeypatch.setattr("omni_speech_accel.deploy.overlay.fit", fit)
    text = config("minicpmo_4_5.yaml", "--platform", "cuda").stdout
    assert item_lines(text, "s3_graph").endswith("Not applied here: the host has no such thing. s3_graph: false")
    named = config("minicpmo_4_5.yaml", "--platform", "cuda", "--on", "s3_graph")
    assert item_lines(named.stdout, "s3_graph").endswith("s3_graph: true")
    assert named.stderr == "warning: s3_graph is switched on and will not be applied: the host has no such thing\n"


def test_without_a_host_only_the_device_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_info", lambda: host.HostInfo(None, {}, None))
    found = unavailable(profile_for("minicpmo_4_5_cuda"))
    assert set(found) == {patch.key for patch in PATCHES if "MiniCPM-o" not in patch.where}
    result = config("minicpmo_4_5.yaml", "--platform", "cuda")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["base_config"] == "minicpmo_4_5.yaml"


def test_a_block_of_one_stage_lists_the_items_of_that_stage() -> None:
    arguments = ("minicpmo_4_5.yaml", "--platform", "cuda", "--place", "additional_config")
    talker = yaml.safe_load(config(*arguments, "--stage", "1").stdout)["stages"][0]
    assert list(talker["additional_config"]["omni_speech_accel"]) == ["stop_index_cache"]
    code2wav = config(*arguments, "--on", "stop_index_cache")
    assert "it acts in stage 1, and this block stands at stage 2" in code2wav.stderr
    assert "stop_index_cache" not in config(*arguments).stdout


def test_a_base_is_found_by_its_bare_name_as_the_host_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minicpmo_4_5").mkdir()
    found = yaml.safe_load(config("minicpmo_4_5").stdout)
    assert found["base_config"] == str(DEPLOY / "minicpmo_4_5.yaml")
    shutil.copytree(tmp_path / "minicpmo_4_5", tmp_path / "minicpmo_4_5_mine")
    result = config("minicpmo_4_5_mine")
    assert result.exit_code == 2
    assert "minicpmo_4_5_mine is a folder" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (("minicpmo_4_5.yaml", "--platform", "cpu"), "MiniCPM-o 4.5 on CPUs"),
        (("minicpmo_4_5.yaml",), "MiniCPM-o 4.5 on CPUs"),  # the test environments have vLLM's CPU build
        (("minicpmo_4_5.yaml", "--platform", "npu"), "MiniCPM-o 4.5 on Ascend NPUs"),
        (("minicpmo_4_5.yaml", "--profile", "minicpmo_4_5_npu"), "MiniCPM-o 4.5 on Ascend NPUs"),
        (("minicpmo_4_5.yaml", "--profile", "minicpmo_4_5_npu", "--platform", "cuda"), "MiniCPM-o 4.5 on NVIDIA GPUs"),
        (("step_audio_2.yaml", "--platform", "npu"), "Step-Audio 2 on Ascend NPUs"),
        (("step_audio_2.yaml", "--profile", "step_audio_2"), "Step-Audio 2 on NVIDIA GPUs and Ascend NPUs"),
    ],
)
def test_the_head_names_the_device_that_the_overlay_is_for(arguments: Sequence[str], title: str) -> None:
    assert config(*arguments).stdout.startswith(f"# {title}: items of omni_speech_accel.")
