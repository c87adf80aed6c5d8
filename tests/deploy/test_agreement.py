# SPDX-License-Identifier: Apache-2.0
"""The server's start and `status`, side by side over generated deploy chains, on the host's own loaders.

The server's side is what happens there: the wrapped config builder, then what the host's own code hands to each stage,
read as the stage's worker reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omni_speech_accel import plugin
from omni_speech_accel.anchors import deploy as anchor
from omni_speech_accel.cli.deploy_view import read_deploy
from omni_speech_accel.deploy.layering import merged, stage_layers
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.session import settings_from_vllm_config
from omni_speech_accel.plugin.settings import BLOCK, SettingsError, resolve

LOCATION = host.host_info().location
assert LOCATION is not None
BASE = LOCATION / "deploy" / "minicpmo_4_5.yaml"
SHM = "connector_of_shared_memory"
STAGES = (0, 1, 2)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server process of ours, on a GPU by its own word."""
    monkeypatch.setattr(anchor, "host_platform", lambda: "cuda")
    import vllm_omni.platforms as platforms

    real = platforms.current_omni_platform

    class Seen:
        device_name = device_type = "cuda"

        def __getattr__(self, attribute: str) -> Any:
            return getattr(real, attribute)

    monkeypatch.setitem(vars(platforms), "current_omni_platform", Seen())
    before = plugin.is_registered()
    plugin.register()
    yield
    if not before:
        plugin.unregister()


Verdict = dict[int, tuple[bool, frozenset[str]]] | str


def on(settings: Any) -> tuple[bool, frozenset[str]]:
    return settings.present, frozenset(key for key in settings.items if settings.enabled(key))


class Heard(logging.Handler):
    """What our part of the server says at start-up."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def server(path: Path) -> tuple[Verdict, list[str]]:
    """Per stage whether it has a block and the items that are on there, or why the start stops; and what is logged."""
    from vllm_omni.config.omni_config import VllmOmniConfig
    from vllm_omni.engine.stage_init_utils import get_stage_connector_spec, load_omni_transfer_config_for_model
    from vllm_omni.model_executor.models.minicpmo_4_5.pipeline import MINICPMO_4_5_PIPELINE

    heard = Heard()
    logger = logging.getLogger("vllm.omni_speech_accel")
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        config = VllmOmniConfig.from_pipeline_config(
            MINICPMO_4_5_PIPELINE, deploy_config_path=str(path), cli_overrides={"model": "none"}
        )
        transfer = load_omni_transfer_config_for_model("none", str(path))
        found = {}
        for stage in STAGES:
            connector = get_stage_connector_spec(transfer, stage, True) if transfer is not None else {}
            vllm_config = SimpleNamespace(
                model_config=SimpleNamespace(stage_connector_config=connector or {"extra": {}}),
                additional_config=config.stage_by_id(stage).runtime_config.additional_config,
            )
            found[stage] = on(settings_from_vllm_config(vllm_config))
        return found, heard.lines
    except SettingsError as error:
        return str(error), heard.lines
    except Exception as error:  # whatever the host itself stops with
        return f"the host: {type(error).__name__}: {error}", heard.lines
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)


def status(path: Path) -> tuple[Verdict, list[str]]:
    """The same, as `status` sees it without the host."""
    try:
        view = read_deploy(path, "cuda")
    except (SettingsError, FileNotFoundError) as error:
        return str(error), []
    content = merged(view.files) if view.blocks else {}
    found = {stage: on(resolve(*stage_layers(content, stage, "cuda"))) for stage in STAGES}
    return found, [notice.text for notice in view.notices]


def assert_agree(path: Path) -> Verdict:
    there, logged = server(path)
    here, told = status(path)
    texts = "\n---\n".join(file.read_text() for file in sorted(path.parent.glob("*.yaml")))
    if BLOCK not in texts:  # the host's own affair: we say nothing, and refuse nothing that it takes
        assert not logged
        assert isinstance(there, str) or not isinstance(here, str), (here, texts)
        return there
    if isinstance(there, str) or isinstance(here, str):
        assert isinstance(there, str), (here, texts)
        assert isinstance(here, str), (there, texts)
        assert here == there or there.startswith("the host: "), texts
        return there
    assert there == here, texts
    assert logged == [f"omni_speech_accel: {text}" for text in told], texts
    if not any(present for present, _ in there.values()):
        assert told, f"a block is written, no stage reads one, and nothing is said:\n{texts}"
    return there


# The generator: files as text, since anchors, merge keys and interpolation live there alone.

BLOCKS = st.sampled_from(
    ["true", "{}", "{s3_graph: false}"] * 2
    + ["false", '"false"', "{speaker_device: true}", "*items", "'${flag}'", "\ttrue", "{<<: [*items, *more]}"]
    + ["\"${oc.decode:'{speaker_stream: false}'}\"", "{s3_grap: true}", "null"]
)
HEAD = """
x-items: &items {s3_graph: false}
x-more: &more {s3_graph: true, speaker_graph: false}
flag: true
"""
EXTRA = st.one_of(
    BLOCKS.map(lambda block: f"{{{BLOCK}: {block}}}" if "\t" not in block else f"{{{BLOCK}:{block}}}"),
    st.sampled_from(["{}", "{x: 1}", "{y: 2}", "{}", "null", "text", f"{{{BLOCK}: {{s3_graph: {{max_graphs: 3}}}}}}"]),
)
OFTEN = st.sampled_from([True, True, True, False])
CONNECTOR = st.builds(
    lambda named, extra: "{" + ", ".join(["name: SharedMemoryConnector"] * named + [f"extra: {extra}"]) + "}",
    OFTEN, EXTRA,
)  # fmt: skip
REFERENCE = st.one_of(st.sampled_from([SHM, SHM, SHM, "mine", "mine", "typo"]), CONNECTOR)
KEYS = {
    "input_connectors": ["from_stage_0", "from_stage_1", "from_stage_x"],
    "output_connectors": ["to_stage_1", "to_stage_2"],
}
ENTRY = st.one_of(
    EXTRA.map(lambda extra: f"additional_config: {extra}"),
    EXTRA.map(lambda extra: f"engine_args: {{additional_config: {extra}}}"),
    EXTRA.map(lambda extra: f"engine_extras: {{additional_config: {extra}}}"),
    st.sampled_from(["max_num_seqs: 2", "input_connectors: null", "output_connectors: {}"]),
    *(
        st.builds(lambda side, key, reference: f"{side}: {{{key}: {reference}}}", st.just(side), st.sampled_from(keys),
                  REFERENCE)
        for side, keys in KEYS.items()
    ),
)  # fmt: skip
STAGE = st.builds(
    lambda number, lines: "{" + ", ".join([f"stage_id: {number}", *lines]) + "}",
    st.sampled_from([2, 2, 2, 1, 1, 0, 9, '"2"']),
    st.lists(ENTRY, min_size=1, max_size=2, unique_by=lambda line: line.split(":")[0]),
)
STAGE_LIST = st.lists(STAGE, max_size=2).map(lambda stages: "[" + ", ".join(stages) + "]")
SECTION = st.builds(
    lambda name, stages: f"platforms: {{{name}: {{stages: {stages}}}}}",
    st.sampled_from(["cuda", "cuda", "npu", "CUDA", "gpu"]), STAGE_LIST,
)  # fmt: skip
LINE = st.one_of(
    st.builds(lambda name, connector: f"connectors: {{{name}: {connector}}}", st.sampled_from([SHM, SHM, "mine"]),
              st.one_of(CONNECTOR, EXTRA.map(lambda extra: f"{{extra: {extra}}}"))),
    STAGE_LIST.map(lambda stages: f"stages: {stages}"),
    SECTION,
    st.sampled_from([f"edges: [{{from: 0, to: 1, {BLOCK}: true}}]", "edges: [{from: 1, to: 2}]", "platforms: null"]),
)  # fmt: skip
FILE = st.lists(LINE, min_size=1, max_size=2, unique_by=lambda line: line.split(":")[0])
# Half of the chains have a good block to lose, so that little has to come together for it to be lost.
CONNECTOR_BLOCK = f"connectors: {{{SHM}: {{extra: {{{BLOCK}: true}}}}}}\n"
STAGE_BLOCK = f"stages: [{{stage_id: 2, additional_config: {{{BLOCK}: true}}}}]"
CHAIN = st.builds(
    lambda base, files: [*base, *files],
    st.sampled_from([[], [], [[CONNECTOR_BLOCK]], [[STAGE_BLOCK]]]),
    st.lists(FILE, min_size=1, max_size=2),
)


def written(folder: Path, files: list[list[str]], *, alone: bool) -> Path:
    """The chain as files over the host's own, the overlay last; ``alone``: over nothing."""
    for old in folder.glob("*.yaml"):
        old.unlink()
    base = "" if alone else str(BASE)
    path = folder / "none"
    for number, lines in enumerate(files):
        path = folder / f"layer{number}.yaml"
        root = f"root: {base}\nbase_config: ${{root}}\n" if base else "pipeline: minicpmo_4_5\n"
        path.write_text(f"{root}{HEAD}" + "\n".join(lines) + "\n")
        base = path.name
    return path


@given(CHAIN, st.sampled_from([False, False, True]))
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_server_and_status_never_disagree(tmp_path: Path, files: list[list[str]], alone: bool) -> None:
    assert_agree(written(tmp_path, files, alone=alone))


def chain(folder: Path, *files: str, alone: bool = False) -> Path:
    return written(folder, [[text] for text in files], alone=alone)


def refused(path: Path) -> str:
    verdict = assert_agree(path)
    assert isinstance(verdict, str)
    assert not verdict.startswith("the host: ")
    return verdict


def items_on(path: Path, stage: int = 2) -> frozenset[str]:
    verdict = assert_agree(path)
    assert not isinstance(verdict, str), verdict
    return verdict[stage][1]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("stages: [{stage_id: 0, output_connectors: {to_stage_1: typo}}]",
         "stages[0].output_connectors.to_stage_1: Undefined connector reference: typo"),
        ("stages: [{stage_id: 1, input_connectors: null}]", "stages[1].input_connectors is null"),
        ("stages: [{stage_id: 2, input_connectors: {from_stage_1: {name: MooncakeStoreConnector}}}]",
         "Connector type mismatch for edge 1->2: "),
        ("stages: [{stage_id: 2, input_connectors: {from_stage_1: {extra: {}}}}]",
         "stages[2].input_connectors.from_stage_1 has no name"),
    ],
)  # fmt: skip
def test_a_transfer_config_that_fails_takes_every_block_of_a_connector_with_it(
    tmp_path: Path, more: str, reason: str
) -> None:
    text = refused(chain(tmp_path, CONNECTOR_BLOCK + more))
    assert f"layer0.yaml: connectors.{SHM}.extra.{BLOCK}: the host hands no connector to any stage" in text
    assert reason in text
    verdict, said = server(chain(tmp_path, more))
    assert verdict == dict.fromkeys(STAGES, (False, frozenset()))
    assert said == []


@pytest.mark.parametrize("extra", ["null", "text"])
def test_an_extra_that_is_no_mapping_is_refused_by_both(tmp_path: Path, extra: str) -> None:
    path = chain(tmp_path, f"connectors: {{{SHM}: {{extra: {extra}}}}}\n{STAGE_BLOCK}")
    assert f"layer0.yaml: connectors.{SHM}.extra must be a mapping" in refused(path)


def test_an_overlay_that_replaces_the_mapping_with_the_block_is_refused_and_both_files_are_named(
    tmp_path: Path,
) -> None:
    text = refused(chain(tmp_path, STAGE_BLOCK, "stages: [{stage_id: 2, additional_config: {x: 1}}]"))
    assert f"layer0.yaml: stages[2].additional_config.{BLOCK}: {tmp_path / 'layer1.yaml'} replaces" in text
    # What the host lays together key by key is no loss.
    nested = "stages: [{stage_id: 2, engine_args: {additional_config: %s}}]"
    assert items_on(chain(tmp_path, nested % f"{{{BLOCK}: true}}", nested % "{x: 1}"))


@pytest.mark.parametrize(("overlay", "told"), [("{s3_graph: false}", 1), ("false", 0), ("true", 0)])
def test_an_overlay_whose_block_replaces_the_bases_is_told_where_it_leaves_items_to_it(
    tmp_path: Path, overlay: str, told: int
) -> None:
    base = f"stages: [{{stage_id: 2, additional_config: {{{BLOCK}: {{speaker_graph: false}}}}}}]"
    path = chain(tmp_path, base, f"stages: [{{stage_id: 2, additional_config: {{{BLOCK}: {overlay}}}}}]")
    assert ("speaker_graph" in items_on(path)) is (overlay != "false")
    _, said = server(path)
    assert len(said) == told
    assert all("layer0.yaml" in text and "layer1.yaml" in text for text in said)


@pytest.mark.parametrize("section", ["", "platforms: {cuda: {%s}}"])
def test_a_second_entry_of_a_stage_that_drops_the_blocks_of_the_first_is_refused(tmp_path: Path, section: str) -> None:
    second = "stage_id: 2, additional_config: {x: 1}"
    stages = f"stages: [{{stage_id: 2, additional_config: {{{BLOCK}: true}}}}, {{{second}}}]"
    for alone in (False, True):
        text = refused(chain(tmp_path, (section or "%s") % stages, alone=alone and not section))
        assert "replaces what it stands in" in text
        assert text.count("layer0.yaml") >= 1


def test_a_tab_after_the_key_is_a_block_for_both(tmp_path: Path) -> None:
    assert items_on(chain(tmp_path, f"connectors: {{{SHM}: {{extra: {{{BLOCK}:\ttrue}}}}}}"))


@pytest.mark.parametrize(("merge", "on"), [("[*items, *more]", False), ("[*more, *items]", True)])
def test_merge_keys_are_laid_together_in_the_hosts_order(tmp_path: Path, merge: str, on: bool) -> None:
    path = chain(tmp_path, f"connectors: {{{SHM}: {{extra: {{{BLOCK}: {{<<: {merge}}}}}}}}}")
    assert ("s3_graph" in items_on(path)) is on


@pytest.mark.parametrize("block", ["'${flag}'", "\"${oc.decode:'true'}\"", "'${x-more}'"])
def test_an_interpolation_is_resolved_for_both(tmp_path: Path, block: str) -> None:
    assert items_on(chain(tmp_path, f"connectors: {{{SHM}: {{extra: {{{BLOCK}: {block}}}}}}}"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CUDA", 'the host has no platform "CUDA"; did you mean "cuda"?'),
        ("gpu", 'the host has no platform "gpu".'),
        ("npu", "it is for a start on npu, and this one is on cuda"),
    ],
)
def test_a_block_for_another_platform_is_told_of_by_both(tmp_path: Path, name: str, words: str) -> None:
    path = chain(tmp_path, f"platforms: {{{name}: {{{STAGE_BLOCK}}}}}")
    assert not items_on(path)
    _, said = server(path)
    assert len(said) == 1
    assert f"platforms.{name}.stages[2].additional_config.{BLOCK}: {words}" in said[0]


def test_a_block_where_no_item_acts_is_told_of_by_both(tmp_path: Path) -> None:
    path = chain(tmp_path, f"stages: [{{stage_id: 0, additional_config: {{{BLOCK}: true}}}}]")
    assert assert_agree(path) != ""
    assert "no item acts in stage 0 of MiniCPM-o" in server(path)[1][0]


@pytest.mark.parametrize(
    ("more", "talker"),
    [
        ("", True),
        ("\nedges: [{from: 0, to: 1}]", False),  # the host makes a connector of its own for it, which is read first
        ("\nedges: [{from: 1, to: 2}]", True),
    ],
)
def test_an_edge_without_a_connector_is_read_before_the_block_of_the_next_one(
    tmp_path: Path, more: str, talker: bool
) -> None:
    connector = f"connectors: {{mine: {{name: SharedMemoryConnector, extra: {{{BLOCK}: true}}}}}}\n"
    stages = "stages: [{stage_id: 0}, {stage_id: 1, output_connectors: {to_stage_2: mine}}, {stage_id: 2}]"
    verdict = assert_agree(chain(tmp_path, connector + stages + more, alone=True))
    assert not isinstance(verdict, str)
    assert (verdict[1][0], verdict[2][0]) == (talker, True)


def test_an_edge_without_a_number_is_passed_over(tmp_path: Path) -> None:
    connectors = f"""connectors:
  mine: {{name: SharedMemoryConnector, extra: {{{BLOCK}: true}}}}
  plain: {{name: SharedMemoryConnector}}
"""
    stage = "stages: [{stage_id: 1, input_connectors: {from_stage_x: plain}, output_connectors: {to_stage_2: mine}}]"
    verdict = assert_agree(chain(tmp_path, connectors + stage, alone=True))
    assert not isinstance(verdict, str)
    assert verdict[1][0]
