# SPDX-License-Identifier: Apache-2.0
"""Which stage reads which block, told without the host, held against the host's own loader."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omni_speech_accel.anchors.explain import explain
from omni_speech_accel.cli.status import Platform, collect
from omni_speech_accel.deploy.blocks import Reading, find_blocks, read_by
from omni_speech_accel.deploy.files import DeployFile, read_chain
from omni_speech_accel.deploy.layering import merged, stage_ids, stage_layers
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.settings import BLOCK, resolve
from omni_speech_accel.plugin.table import patch_for

SHM = "connector_of_shared_memory"
# Where a block may stand, by the keys that lead to it; a number is a stage.
PLACES: tuple[tuple[str | int, ...], ...] = (
    ("connectors", SHM, "extra"),
    ("stages", 2, "additional_config"),
    ("stages", 2, "engine_args", "additional_config"),
    ("stages", 2, "engine_extras", "additional_config"),
    ("stages", 1, "additional_config"),
    ("stages", 1, "input_connectors", "from_stage_0", "extra"),
    ("platforms", "cuda", "stages", 2, "additional_config"),
    ("platforms", "cuda", "stages", 2, "engine_args", "additional_config"),
    ("platforms", "cuda", "stages", 2, "engine_extras", "additional_config"),
    ("platforms", "npu", "stages", 2, "additional_config"),
)
BLOCKS: tuple[Any, ...] = (
    True,
    False,
    "false",
    {},
    {"speaker_device": False},
    {"speaker_device": True, "cold_reference_batch": {"max_batch": 4}},
    {"cold_reference_batch": {"enabled": False}, "s3_graph": {"max_graphs": 4}},
)


def put(content: dict[str, Any], place: tuple[str | int, ...], block: Any) -> None:
    node: Any = content
    for part in place:
        if isinstance(part, int):
            entry = next((entry for entry in node if entry["stage_id"] == part), None)
            if entry is None:
                node.append(entry := {"stage_id": part})
            node = entry
        else:
            node = node.setdefault(part, [] if part == "stages" else {})
    node[BLOCK] = copy.deepcopy(block)
    if place[-2:] == ("from_stage_0", "extra"):
        for stage in (stage for stage in content["stages"] if stage["stage_id"] == 1):
            stage["input_connectors"]["from_stage_0"]["name"] = "SharedMemoryConnector"


def written(folder: Path, *files: list[tuple[tuple[str | int, ...], Any]]) -> Path:
    """A chain of deploy files over the host's, the base first; returns the overlay's path."""
    location = host.host_info().location
    assert location is not None
    base = str(location / "deploy" / "minicpmo_4_5.yaml")
    path = folder / "none"
    for number, blocks in enumerate(files):
        content: dict[str, Any] = {"base_config": base}
        for place, block in blocks:
            put(content, place, block)
        path = folder / f"layer{number}.yaml"
        path.write_text(yaml.safe_dump(content))
        base = path.name
    return path


def lost(files: tuple[DeployFile, ...], known: frozenset[int] | None = None) -> list[Reading]:
    return [reading for reading in read_by(files, "cuda", known) if reading.lost]


layer = st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(BLOCKS)), max_size=3, unique_by=lambda one: one[0])


@given(layer, layer)
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_stage_reads_what_the_host_hands_it(
    tmp_path: Path, base: list[tuple[tuple[str | int, ...], Any]], overlay: list[tuple[tuple[str | int, ...], Any]]
) -> None:
    path = written(tmp_path, base, overlay)
    files = read_chain(path)
    content = merged(files)
    report = explain(path, platform="cuda")
    contents = [*(file.content for file in files), content]
    problems = [block.problem for one in contents for block in find_blocks(one) if block.problem]
    problems = problems or [reading.lost for reading in lost(files)]
    if problems:
        assert any(problem in report.error for problem in problems)
        return
    assert not report.error
    assert [stage.stage for stage in report.stages] == stage_ids(content)
    for stage in report.stages:
        found = resolve(*stage_layers(content, stage.stage, "cuda"))
        on = tuple(key for key in found.items if found.enabled(key))
        assert (found.present, on) == (stage.present, stage.on)


def test_a_chain_is_laid_together_as_the_host_does(tmp_path: Path) -> None:
    from vllm_omni.config.stage_config import resolve_deploy_yaml

    path = written(
        tmp_path,
        [(PLACES[0], {"s3_graph": {"enabled": False}}), (PLACES[2], True), (PLACES[6], {"speaker_device": False})],
        [(PLACES[0], {"s3_graph": {"max_graphs": 3}}), (PLACES[1], False), (PLACES[9], True)],
    )
    theirs, ours = resolve_deploy_yaml(path), merged(read_chain(path))
    for part in ("connectors", "stages", "platforms"):
        assert ours[part] == theirs[part]


def host_extra(content: dict[str, Any], stage: int) -> dict[str, Any]:
    """The connector ``extra`` that the host's own code hands to a stage."""
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config
    from vllm_omni.engine.stage_init_utils import get_stage_connector_spec

    spec = get_stage_connector_spec(load_omni_transfer_config(config_dict=content), stage, True)
    found: dict[str, Any] = spec.get("extra", {})
    return found


OWN = {"name": "SharedMemoryConnector", "extra": {"omni_speech_accel": True}}
CONNECTIONS: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    # connectors, stages over the host's file, the place of a block that no stage is handed
    ({"mine": OWN}, [{"stage_id": 2, "input_connectors": {"from_stage_1": "mine"}}], "connectors.mine.extra"),
    (
        {"mine": OWN},
        [{"stage_id": 1, "output_connectors": {"to_stage_2": "mine"}}],
        "",
    ),
    (
        {"mine": OWN},
        [
            {"stage_id": 1, "output_connectors": {"to_stage_2": "mine"}},
            {"stage_id": 2, "input_connectors": {"from_stage_1": "mine"}},
        ],
        "",
    ),
    ({}, [{"stage_id": 2, "input_connectors": {"from_stage_1": OWN}}], "stages[2].input_connectors.from_stage_1.extra"),
    ({}, [{"stage_id": 0, "output_connectors": {"to_stage_1": OWN}}], ""),
    (
        {"mine": OWN},
        [{"stage_id": 1, "output_connectors": {"to_stage_2": "connector_of_shared_memory", "to_stage_9": "mine"}}],
        "connectors.mine.extra",
    ),
]


@pytest.mark.parametrize(("connectors", "stages", "place"), CONNECTIONS)
def test_a_connector_that_the_host_hands_to_no_stage_is_an_error(
    tmp_path: Path, connectors: dict[str, Any], stages: list[dict[str, Any]], place: str
) -> None:
    path = written(tmp_path, [])
    overlay = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**overlay, "connectors": connectors, "stages": stages}))
    content = merged(read_chain(path))
    known = frozenset(range(3))
    handed = ["omni_speech_accel" in host_extra(content, stage) for stage in known]
    places = [reading.block.place for reading in lost(read_chain(path), known)]
    assert any(handed) is (places == [])
    assert places == ([f"{place}.omni_speech_accel"] if place else [])
    report = explain(path, platform="cuda")
    assert ("hands this connector to no stage" in report.error) is bool(place)


CASES = [
    # connector, stage 2's own block, what status says of three items
    ({"speaker_device": True}, {"speaker_device": False, "sync_free_prompt": False}, ("off", "off", "on")),
    (True, False, ("off", "off", "off")),
    (False, {"speaker_device": True}, ("on", "off", "off")),
    ("false", {"speaker_device": {}}, ("on", "off", "off")),
    (False, True, ("on", "on", "on")),
    ({"speaker_device": False}, {"sync_free_prompt": False}, ("off", "off", "on")),
]


@pytest.mark.parametrize(("connector", "own", "states"), CASES)
def test_status_says_what_the_stage_will_do(
    tmp_path: Path, connector: Any, own: Any, states: tuple[str, str, str]
) -> None:
    path = written(tmp_path, [(PLACES[0], connector), (PLACES[1], own)])
    found = {item.key: item.state for item in collect(path, platform=Platform("cuda", "test")).items}
    keys = ("speaker_device", "sync_free_prompt", "cross_reference_decode")
    assert tuple(found[key] for key in keys) == states
    if fit(patch_for("stop_index_cache")).applies:
        # The talker is another stage: it reads the connector alone.
        assert found["stop_index_cache"] == ("off" if connector in (False, "false") else "on")


@pytest.mark.parametrize(
    ("base", "overlay", "state"),
    [
        ({"speaker_device": True}, False, "off"),
        ({"speaker_device": False}, True, "on"),
        ({"cold_reference_batch": {"enabled": False}}, {"cold_reference_batch": {"max_batch": 4}}, "off"),
    ],
)
def test_status_lays_an_overlay_over_its_base_as_the_host_does(
    tmp_path: Path, base: Any, overlay: Any, state: str
) -> None:
    key = next(iter(base))
    path = written(tmp_path, [(PLACES[0], base)], [(PLACES[0], overlay)])
    found = {item.key: item.state for item in collect(path, platform=Platform("cuda", "test")).items}
    assert found[key] == state


def test_a_block_at_a_connector_that_no_stage_uses_is_an_error_without_the_host(tmp_path: Path) -> None:
    path = written(tmp_path, [(("connectors", "connector_of_shared_memroy", "extra"), True)])
    with pytest.raises(ValueError, match=rf"connector_of_shared_memroy.*no stage of this deploy uses.*{SHM}"):
        collect(path, platform=Platform("cuda", "test"))
