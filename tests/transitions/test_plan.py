# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_speech_accel.transitions import CannotCompare
from omni_speech_accel.transitions.inputs import SpeechInput, builtin_pool, load_pool, split_by_length
from omni_speech_accel.transitions.plan import PATTERNS, State, build_plan

POOL = builtin_pool()


def transition(name: str, size: int = 3):
    return next(item for item in build_plan(POOL, [size], 0) if item.name == name)


@given(st.integers(2, 12), st.integers(0, 1000))
def test_every_plan_can_be_played_to_its_end(size, seed):
    for item in build_plan(POOL, [size], seed):
        for spec in item.streams:
            # A start that waits for a later stream, or a cancel for one that may never start, could wait for ever.
            assert all(condition.stream < spec.index for condition in spec.starts_after), item.name
            assert all(condition.stream < len(item.streams) for condition in spec.cancels_after)
            assert all(condition.state is State.AUDIO for condition in spec.cancels_after)
        assert item.peak <= len(item.streams)


@given(st.integers(2, 9), st.integers(0, 1000))
def test_the_same_seed_gives_the_same_plan_and_another_seed_another(size, seed):
    assert build_plan(POOL, [size], seed) == build_plan(POOL, [size], seed)
    assert build_plan(POOL, [size], seed) != build_plan(POOL, [size], seed + 1)


@given(st.integers(2, 12), st.integers(0, 1000))
def test_streams_of_one_transition_say_different_things(size, seed):
    for item in build_plan(POOL, [size], seed):
        assert len({(spec.text, spec.seed) for spec in item.streams}) == len(item.streams)


@given(st.integers(2, 9), st.integers(0, 1000))
def test_churn_never_has_more_streams_alive_than_its_size(size, seed):
    item = next(item for item in build_plan(POOL, [size], seed) if item.name.startswith("churn"))
    waits = [c.stream for spec in item.streams for c in spec.starts_after if c.state is State.ENDED]
    assert len(item.streams) == 2 * size
    assert len(waits) == len(set(waits)) == size  # each of the later half takes the place of one that ended


def test_only_chosen_patterns_at_every_size_and_in_order():
    plan = build_plan(POOL, [3, 5], 0, ["cancel", "solo"])
    assert [item.name for item in plan] == ["solo", "cancel-3", "cancel-5"]
    assert len(build_plan(POOL, [3, 5, 7], 0)) == 2 + 3 * (len(PATTERNS) - 2)


def test_a_late_joiner_waits_for_all_and_a_slot_taker_for_the_one_that_left():
    joiner = transition("late-join-3").streams[-1]
    assert [(c.stream, c.state) for c in joiner.starts_after] == [(0, State.AUDIO), (1, State.AUDIO), (2, State.AUDIO)]
    *_, leaver, taker = transition("slot-reuse-3").streams
    assert leaver.cancelled
    assert [(c.stream, c.state) for c in taker.starts_after] == [(leaver.index, State.ENDED)]


def test_an_early_finish_has_one_long_stream_among_short_ones():
    long, *short = transition("early-finish-5", 5).streams
    assert all(len(long.text) > 2 * len(spec.text) for spec in short)


@pytest.mark.parametrize("sizes", [[1], [], [3, 0]])
def test_a_batch_that_cannot_change_is_refused(sizes):
    with pytest.raises(CannotCompare, match="at least 2 streams"):
        build_plan(POOL, sizes, 0)


def test_an_unknown_pattern_is_refused_with_the_known_ones():
    with pytest.raises(CannotCompare, match="'padding'; there are: solo, padded"):
        build_plan(POOL, [3], 0, ["padding"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("only one\n", "at least two inputs"),
        ("the same\nthe size\n", "too alike in length"),
        ('{"voice": "a"}\nx\n', "inputs.txt:1: a JSON line needs a non-empty 'input'"),
        ("x\n{oops\n", "inputs.txt:2: not a JSON object"),
    ],
)
def test_inputs_that_cannot_serve_are_refused_with_the_line(tmp_path, content, said):
    path = tmp_path / "inputs.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CannotCompare, match=said):
        load_pool(path)


def test_the_shorter_third_ends_early():
    pool = split_by_length([SpeechInput("x" * length) for length in (90, 4, 100, 80, 5, 70)])
    assert [len(item.text) for item in pool.short] == [4, 5]
    assert [len(item.text) for item in pool.long] == [70, 80, 90, 100]
