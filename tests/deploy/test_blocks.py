# SPDX-License-Identifier: Apache-2.0
"""Blocks in deploy files: which places reach a stage, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_speech_accel.deploy.blocks import check_blocks, find_blocks
from omni_speech_accel.deploy.files import read_chain
from omni_speech_accel.plugin.settings import BLOCK, SettingsError


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def nest(value: Any, *path: str | int) -> Any:
    """``value`` at ``path``; an int stands for a list with one stage of that id."""
    for part in reversed(path):
        value = [{"stage_id": part, **value}] if isinstance(part, int) else {part: value}
    return value


def only_block(*path: str | int) -> Any:
    (block,) = find_blocks(nest({BLOCK: True}, *path))
    return block


@pytest.mark.parametrize(
    "path",
    [
        ("connectors", "shm", "extra"),
        ("stages", 2, "additional_config"),
        ("stages", 2, "engine_args", "additional_config"),
        ("stages", 2, "engine_extras", "additional_config"),
        ("stages", 2, "input_connectors", "from_stage_1", "extra"),
        ("platforms", "npu", "stages", 2, "additional_config"),
        ("platforms", "npu", "stages", 2, "engine_args", "additional_config"),
    ],
)
def test_block_in_a_place_that_the_host_hands_on_is_good(path: tuple[str | int, ...]) -> None:
    assert only_block(*path).problem == ""


@pytest.mark.parametrize(
    ("path", "belongs"),
    [
        ((), "connectors.<name>.extra.omni_speech_accel"),
        (("edges", 0), "connectors.<name>.extra.omni_speech_accel"),
        (("platforms", "npu"), "stages[<id>].additional_config.omni_speech_accel"),
        (("platforms", "npu", "connectors", "shm", "extra"), "stages[<id>].additional_config.omni_speech_accel"),
        (("connectors",), "connectors.<name>.extra.omni_speech_accel"),
        (("connectors", "shm"), "connectors.shm.extra.omni_speech_accel"),
        (("connectors", "shm", "extra", "deeper"), "connectors.shm.extra.omni_speech_accel"),
        (("stages", 2, "runtime"), "stages[2].additional_config.omni_speech_accel"),
        (("stages", 2, "additional_config", "deeper"), "stages[2].additional_config.omni_speech_accel"),
        (("duplex_session",), "connectors.<name>.extra.omni_speech_accel"),
    ],
)
def test_block_that_the_host_ignores_is_an_error_that_names_the_right_place(
    path: tuple[str | int, ...], belongs: str
) -> None:
    problem = only_block(*path).problem
    assert "ignores" in problem
    assert belongs in problem


@pytest.mark.parametrize(
    ("path", "belongs"),
    [
        (("stages", 2), "stages[2].additional_config.omni_speech_accel"),
        (("stages", 2, "engine_args"), "stages[2].additional_config.omni_speech_accel"),
        (("platforms", "npu", "stages", 2), "platforms.npu.stages[2].additional_config.omni_speech_accel"),
    ],
)
def test_block_that_the_host_rejects_is_an_error_that_names_the_right_place(
    path: tuple[str | int, ...], belongs: str
) -> None:
    problem = only_block(*path).problem
    assert "rejects" in problem
    assert belongs in problem


def test_platform_entry_with_engine_args_loses_its_flat_block() -> None:
    entry = {"stage_id": 2, "engine_args": {"max_num_seqs": 1}, "additional_config": {BLOCK: True}}
    (block,) = find_blocks({"platforms": {"npu": {"stages": [entry]}}})
    assert "platforms.npu.stages[2].engine_args.additional_config.omni_speech_accel" in block.problem


@pytest.mark.parametrize("number", ["2", True, 2.0, [2]])
def test_a_stage_id_that_is_no_number_is_named(number: object) -> None:
    (block,) = find_blocks({"stages": [{"stage_id": number, "additional_config": {"omni_speech_accel": True}}]})
    assert block.problem == f"the stage_id of this entry must be a number, not {number!r}"


def test_stages_are_named_by_id_not_by_position() -> None:
    assert only_block("stages", 7, "additional_config").place == "stages[7].additional_config.omni_speech_accel"


@pytest.mark.parametrize("name", ["omni_speech_acel", "omni-speech-accel", "omni_speach_accel", "Omni_Speech_Accel"])
def test_misspelt_block_name_is_an_error(name: str) -> None:
    (block,) = find_blocks({"connectors": {"shm": {"extra": {name: True}}}})
    assert 'did you mean "omni_speech_accel"?' in block.problem


def test_misspelt_item_is_named_with_file_place_and_nearest_item(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("stages: [{stage_id: 2, additional_config: {omni_speech_accel: {speaker_grph: true}}}]")
    with pytest.raises(SettingsError) as caught:
        check_blocks(read_chain(path, tmp_path / "deploy"))
    message = str(caught.value)
    assert str(path) in message
    assert (
        'stages[2].additional_config.omni_speech_accel.speaker_grph: unknown item; did you mean "speaker_graph"?'
        in (message)
    )


def test_wrong_block_in_a_base_file_is_found_and_that_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("omni_speech_accel: true")
    (tmp_path / "my.yaml").write_text("base_config: base.yaml")
    with pytest.raises(SettingsError, match=r"base\.yaml: omni_speech_accel: the host ignores"):
        check_blocks(read_chain(tmp_path / "my.yaml", tmp_path / "deploy"))


def test_no_file_of_the_host_looks_like_it_has_a_block() -> None:
    from vllm_omni.config import stage_config

    found = [
        (path.name, block.place)
        for path in sorted(Path(stage_config._DEPLOY_DIR).glob("*.yaml"))
        for block in find_blocks(load(path) or {})
    ]
    assert found == []
