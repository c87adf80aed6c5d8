# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_speech_accel.measure.abba import PHASES, Row, audio_ratio, comparable, schedule, summarize


def row(
    arm: str, seconds: float, *, audio: float = 2.0, kind: str = "measured", pair: str = "b", **other: object
) -> Row:
    values = {"pair": pair, "arm": arm, "number": 0, "kind": kind, "phase": "steady_chunk", "index": 1, "streams": 2}
    return Row(**{**values, **other}, seconds=seconds, audio_seconds=audio)  # type: ignore[arg-type]


def test_passes_run_in_abba_order_after_the_warm_up() -> None:
    turns = schedule("a", "b", 4)
    assert [turn.arm for turn in turns] == ["a", "b", "a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]
    assert [turn.kind for turn in turns[:4]] == ["warm-up", "warm-up", "discarded", "discarded"]
    assert {turn.kind for turn in turns[4:]} == {"measured"}
    assert [turn.arm for turn in turns[4:8]] == ["b", "a", "a", "b"]


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 100))
def test_both_arms_run_every_pass_once_and_no_pass_number_repeats(repeats: int, warmups: int, first: int) -> None:
    turns = schedule("a", "b", repeats, warmups=warmups, first=first)
    for arm in ("a", "b"):
        assert [turn.number for turn in turns if turn.arm == arm] == list(range(first, first + warmups + 1 + repeats))
    leads = [turns[index].arm for index in range(0, len(turns), 2)][warmups:]
    assert all(left != right for left, right in pairwise(leads))


@pytest.mark.parametrize(("arm", "repeats"), [("a", 2), ("b", 0)])
def test_a_schedule_that_compares_nothing_is_refused(arm: str, repeats: int) -> None:
    with pytest.raises(ValueError):
        schedule("a", arm, repeats)


def test_speedup_is_the_ratio_of_medians_of_measured_rows_of_the_same_pair() -> None:
    rows = [
        row("a", 100.0, kind="warm-up"),
        row("a", 100.0, kind="discarded"),
        *(row("a", seconds) for seconds in (0.4, 0.5, 0.9)),
        *(row("b", seconds) for seconds in (0.2, 0.25, 0.3)),
        row("a", 50.0, pair="c"),
        row("c", 25.0, pair="c"),
    ]
    found = {summary.arm: summary for summary in summarize(rows, ["a", "b", "c"], "a")}
    assert found["b"].speedup == pytest.approx(0.5 / 0.25)
    assert found["b"].low == pytest.approx(0.4 / 0.3)
    assert found["b"].high == pytest.approx(0.9 / 0.2)
    assert (found["b"].median_ms, found["b"].min_ms, found["b"].max_ms) == pytest.approx((250.0, 200.0, 300.0))
    assert found["b"].baseline_ms == pytest.approx(500.0)
    assert found["c"].speedup == pytest.approx(2.0)
    assert found["a"].speedup is None
    assert found["a"].count == 4


def test_no_ratio_where_the_arms_made_different_amounts_of_audio() -> None:
    rows = [row("a", 1.0, audio=2.0), row("b", 0.5, audio=1.0)]
    assert audio_ratio(rows, "b", "a") == pytest.approx(0.5)
    assert not comparable(audio_ratio(rows, "b", "a"))
    (summary,) = [summary for summary in summarize(rows, ["a", "b"], "a") if summary.arm == "b"]
    assert summary.speedup is None
    assert summary.median_ms == pytest.approx(500.0)


def test_a_hop_of_audio_does_not_forbid_the_comparison() -> None:
    rows = [row("a", 1.0, audio=48.0), row("b", 0.5, audio=48.02)]
    assert comparable(audio_ratio(rows, "b", "a"))


def test_phases_are_summarized_apart() -> None:
    rows = [row(arm, seconds, phase=phase) for phase in PHASES for arm, seconds in (("a", 1.0), ("b", 0.5))]
    assert [(summary.phase, summary.arm) for summary in summarize(rows, ["a", "b"], "a")] == [
        (phase, arm) for phase in PHASES for arm in ("a", "b")
    ]
