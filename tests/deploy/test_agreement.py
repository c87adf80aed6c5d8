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
    if isinstance(there, str) or isinstance(here, str):
        assert isinstance(there, str), (here, texts)
        assert isinstance(here, str), (there, texts)
        assert here == there or there.startswith("the host: "), texts
        return there
    assert there == here, texts
    if BLOCK not in texts:
        assert logged == []
        return there
    assert logged == [f"omni_speech_accel: {text}" for text in told], texts
    if not any(present for present, _ in there.values()):
        assert told, f"a block is written, no stage reads one, and nothing is said:\n{texts}"
    return there


# The generator: files as text, since anchors, merge keys and interpolation live there alone.

BLOCKS = st.sampled_from(
    ["true", "false", '"false"', "{}", "{s3_graph: false}", "{speaker_device: true}", "*items", "${flag}",
     '${oc.decode:"{speaker_stream: false}"}', "{<<: [*items, *more]}", "\ttrue", "{s3_grap: true}", "null"]
)  # fmt: skip
HEAD = """
x-items: &items {s3_graph: false}
x-more: &more {s3_graph: true, speaker_graph: false}
flag: true
"""
EXTRA = st.one_of(
    BLOCKS.map(lambda block: f"{{{BLOCK}: {block}}}" if "\t" not in block else f"{{{BLOCK}:{block}}}"),
    st.sampled_from(["{}", "{x: 1}", "null", "text", f"{{{BLOCK}: {{s3_graph: {{max_graphs: 3}}}}}}"]),
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
CHAIN = st.lists(FILE, min_size=1, max_size=2)


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
@hypothesis_settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_server_and_status_never_disagree(tmp_path: Path, files: list[list[str]], alone: bool) -> None:
    assert_agree(written(tmp_path, files, alone=alone))
