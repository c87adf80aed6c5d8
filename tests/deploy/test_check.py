# SPDX-License-Identifier: Apache-2.0
"""What only the check of a deploy tells: whether the host starts an item's model at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from omni_speech_accel.cli.app import app
from omni_speech_accel.cli.status import NOT_APPLIED, Platform, collect
from omni_speech_accel.deploy import check as module
from omni_speech_accel.deploy.check import refused_model
from omni_speech_accel.deploy.files import stock_folder
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.table import PATCHES, patch_for

FISH = patch_for("fish_omni_full_graph")
NPU = Platform("npu", "test")
needs_fish = pytest.mark.skipif(not fit(FISH).applies, reason="this host has no fish_omni")


def test_the_rows_say_which_verified_host_refuses_an_items_model() -> None:
    refused = {patch.key for patch in PATCHES for platform in patch.platforms if refused_model(patch, platform)}
    assert refused == {patch.key for patch in PATCHES if host.host_info().version in patch.refused_on}


@needs_fish
def test_status_says_that_the_host_refuses_the_model_of_an_item() -> None:
    item = next(item for item in collect(platform=NPU).items if item.key == FISH.key)
    assert item.state == NOT_APPLIED
    assert item.reason == "the host refuses its own fish_omni.yaml on npu: Model Runner V2 is not supported on NPU"


@needs_fish
def test_status_of_a_deploy_that_the_host_refuses_has_no_item_on(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    extra = {"omni_speech_accel": {FISH.key: True}}
    connectors = {"connector_of_shared_memory": {"extra": extra}}
    path.write_text(yaml.safe_dump({"base_config": str(stock_folder() / "fish_omni.yaml"), "connectors": connectors}))
    found = collect(path, platform=NPU)
    item = next(item for item in found.items if item.key == FISH.key)
    assert item.state == NOT_APPLIED
    assert "Model Runner V2 is not supported on NPU" in item.reason
    assert found.exit_code == 1


@needs_fish
def test_config_writes_an_item_off_whose_model_the_host_refuses() -> None:
    result = CliRunner().invoke(app, ["config", "fish_omni.yaml", "--platform", "npu", "--json"])
    assert result.exit_code == 0, result.stderr
    text = " ".join(line.strip(" #") for line in json.loads(result.stdout)["text"].splitlines())
    assert "Not applied here: the host refuses its own fish_omni.yaml on npu" in text
    assert f"{FISH.key}: false" in text


@needs_fish
@pytest.mark.parametrize("platforms", [{"npu": {"model_runner": "v1"}}, {}])
def test_a_host_whose_own_file_asks_npu_for_v1_starts_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platforms: dict[str, object]
) -> None:
    content = yaml.safe_load((stock_folder() / "fish_omni.yaml").read_text())
    (tmp_path / "fish_omni.yaml").write_text(yaml.safe_dump({**content, "platforms": platforms}))
    monkeypatch.setattr(module, "stock_folder", lambda: tmp_path)
    module._refused_base.cache_clear()
    assert bool(refused_model(FISH, "npu")) is not bool(platforms)
    module._refused_base.cache_clear()


def test_without_a_host_status_reads_plain_yaml_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("connectors: {}")
    for name in ("deploy.files", "cli.deploy_view"):
        monkeypatch.setattr(f"omni_speech_accel.{name}.host_reader", lambda: None)
    assert any("read as plain YAML" in note.text for note in collect(path, platform=Platform("cuda", "test")).notes)
