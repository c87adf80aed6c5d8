# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_speech_accel.plugin.options import GraphOptions
from omni_speech_accel.plugin.settings import SettingsError, parse_block, resolve
from omni_speech_accel.plugin.table import PATCHES

KEYS = [patch.key for patch in PATCHES]
DEFAULT_ON = {patch.key for patch in PATCHES if patch.default}


def enabled(block: object) -> set[str]:
    settings = resolve(("here", block))
    return {key for key in KEYS if settings.enabled(key)}


def test_no_block_is_stock() -> None:
    settings = resolve()
    assert not settings.present
    assert not any(settings.enabled(key) for key in KEYS)


@pytest.mark.parametrize("block", [True, {}, "true", "on"])
def test_a_block_without_items_turns_the_default_items_on(block: object) -> None:
    assert enabled(block) == DEFAULT_ON


@pytest.mark.parametrize("block", [False, "false", "off", "0", "no"])
def test_a_false_block_turns_everything_off_in_any_spelling(block: object) -> None:
    assert enabled(block) == set()
    assert resolve(("here", block)).present


@pytest.mark.parametrize("off", [False, "false", "False", "off", {"enabled": False}, {"enabled": "false"}])
def test_one_item_is_turned_off_alone(off: object) -> None:
    assert enabled({"speaker_graph": off}) == DEFAULT_ON - {"speaker_graph"}


def test_options_of_an_item_are_typed() -> None:
    options = resolve(("here", {"s3_graph": {"max_graphs": 4}})).options("s3_graph")
    assert isinstance(options, GraphOptions)
    assert options.max_graphs == 4
    default = resolve(("here", True)).options("s3_graph")
    assert isinstance(default, GraphOptions)
    assert default.max_graphs == 2


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"speaker_grph": True}, ["P.speaker_grph", "unknown item", 'did you mean "speaker_graph"?']),
        ({"s3_graph": {"max_graph": 4}}, ["P.s3_graph.max_graph", "unknown option", 'did you mean "max_graphs"?']),
        ({"s3_graph": {"max_graphs": -1}}, ["P.s3_graph.max_graphs", "greater than or equal to 0", "-1"]),
        ({"s3_graph": {"max_graphs": "4"}}, ["P.s3_graph.max_graphs", "valid integer", "'4'"]),
        ({"s3_graph": {"max_graphs": True}}, ["P.s3_graph.max_graphs", "valid integer"]),
        ({"s3_graph": {"max_graphs": 1000}}, ["P.s3_graph.max_graphs", "1000"]),
        ({"s3_graph": 4}, ["P.s3_graph", "true, false or a mapping"]),
        ({"s3_graph": None}, ["P.s3_graph", "true, false or a mapping"]),
        ({"s3_graph": "maybe"}, ["P.s3_graph", "'maybe'"]),
        ({"s3_graph": []}, ["P.s3_graph", "true, false or a mapping"]),
        (["s3_graph"], ["P", "true, false or a mapping"]),
        (None, ["P", "true, false or a mapping", "None"]),
        (1, ["P", "true, false or a mapping"]),
        ({3: True}, ["P.3", "unknown item"]),
    ],
)
def test_a_wrong_block_names_the_key_its_place_and_the_nearest_name(block: object, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_block(block, "P")
    message = str(caught.value)
    assert message.startswith("omni_speech_accel: ")
    for word in words:
        assert word in message


def test_a_later_layer_overrides_item_by_item() -> None:
    settings = resolve(
        ("extra", {"speaker_graph": False, "s3_graph": {"max_graphs": 4}}),
        ("additional", {"s3_graph": {"max_graphs": 8}}),
    )
    assert not settings.enabled("speaker_graph")
    options = settings.options("s3_graph")
    assert isinstance(options, GraphOptions)
    assert options.max_graphs == 8


def test_a_bool_layer_replaces_what_came_before() -> None:
    assert not resolve(("a", {}), ("b", False)).enabled("s3_graph")
    assert resolve(("a", {"s3_graph": False}), ("b", True)).enabled("s3_graph")


def test_over_false_only_what_a_layer_names_is_on() -> None:
    settings = resolve(("a", "false"), ("b", {"s3_graph": {"max_graphs": 3}, "speaker_graph": False}))
    assert [key for key in settings.items if settings.enabled(key)] == ["s3_graph"]
    assert not any(resolve(("a", False), ("b", {})).enabled(key) for key in KEYS)


def test_a_wrong_layer_is_refused_even_where_another_overrides_it() -> None:
    with pytest.raises(SettingsError, match=r"extra\.nope"):
        resolve(("extra", {"nope": 1}), ("additional", False))


@pytest.mark.parametrize("value", ["disabled", "n", "none", "0.0"])
def test_a_kill_switch_of_no_known_value_stops_a_stage(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_SPEECH_ACCEL", value)
    with pytest.raises(SettingsError, match=f"OMNI_SPEECH_ACCEL={value} in the environment: takes 0, false, off or no"):
        resolve(("connectors", True))
    assert not resolve().present


@given(st.dictionaries(st.sampled_from(KEYS), st.booleans()))
def test_each_item_is_its_own_switch(block: dict[str, bool]) -> None:
    expected = {key for key in KEYS if block.get(key, key in DEFAULT_ON)}
    assert enabled(block) == expected


@given(st.text(min_size=1).filter(lambda name: name not in KEYS))
def test_no_unknown_name_is_ever_accepted(name: str) -> None:
    with pytest.raises(SettingsError):
        parse_block({name: True})


@pytest.mark.parametrize(
    ("layers", "allowed"),
    [
        (({},), False),
        ((True,), False),
        (({"allow_unverified_host": True},), True),
        (({"allow_unverified_host": "on"},), True),
        (({"allow_unverified_host": True}, {"s3_graph": False}), True),
        (({"allow_unverified_host": True}, {"allow_unverified_host": False}), False),
        (({"allow_unverified_host": True}, True), False),
    ],
)
def test_an_unverified_host_is_allowed_by_a_key_of_the_block(layers: tuple[Any, ...], allowed: bool) -> None:
    settings = resolve(*(("place", layer) for layer in layers))
    assert settings.allow_unverified_host is allowed
    assert "allow_unverified_host" not in settings.items


@pytest.mark.parametrize("value", [1, None, "maybe", {"enabled": True}])
def test_what_allows_an_unverified_host_is_true_or_false(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"place\.allow_unverified_host: takes true or false"):
        resolve(("place", {"allow_unverified_host": value}))


def test_a_misspelt_key_is_told_its_name() -> None:
    with pytest.raises(SettingsError, match='did you mean "allow_unverified_host"'):
        resolve(("place", {"allow_unverifed_host": True}))
