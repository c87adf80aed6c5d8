# SPDX-License-Identifier: Apache-2.0
"""A transition counts only if it was seen to happen; these records say when it was."""

from __future__ import annotations

from omni_speech_accel.transitions.check import missing, peak_streams
from omni_speech_accel.transitions.client import Ending, StreamRecord
from omni_speech_accel.transitions.inputs import builtin_pool
from omni_speech_accel.transitions.plan import build_plan


def transition(name: str):
    return next(item for item in build_plan(builtin_pool(), [3], 0) if item.name == name)


def stream(*audio_at: float, sent: float = 0.0, ending: Ending = Ending.COMPLETE, ended: float | None = None):
    at = list(audio_at)
    return StreamRecord(ending=ending, sent_at=sent, audio_at=at, ended_at=at[-1] if ended is None else ended)


def test_streams_that_ran_one_after_another_did_not_overlap():
    records = [stream(1, 2), stream(3, 4), stream(5, 6)]
    assert peak_streams(records) == 1
    assert missing(transition("padded-3"), records) == ["1 of 3 streams overlapped"]


def test_a_client_that_left_holds_its_row_until_it_left():
    assert peak_streams([stream(1, ending=Ending.CANCELLED, ended=3), stream(2, 4)]) == 2


def test_streams_without_audio_overlap_with_nobody():
    assert peak_streams([StreamRecord(), StreamRecord()]) == 0


def test_a_joiner_must_fall_among_the_audio_of_others():
    base = [stream(1, 9), stream(1, 9), stream(1, 9)]
    assert missing(transition("late-join-3"), [*base, stream(3, 5, sent=2)]) == []
    too_late = missing(transition("late-join-3"), [*base, stream(10, 11, sent=2)])
    assert "stream 3 did not join while others were decoding" in too_late


def test_a_client_must_leave_before_its_stream_ends_and_others_must_go_on():
    left = stream(2, ending=Ending.CANCELLED, ended=3)
    assert missing(transition("cancel-3"), [stream(1, 9), left, stream(1, 9)]) == []
    assert missing(transition("cancel-3"), [stream(1, 9), stream(2, 3), stream(1, 9)]) == [
        "stream 1 ended before its client left"
    ]
    assert missing(transition("cancel-3"), [stream(1, 2.5), left, stream(1, 2.5)]) == [
        "nobody was streaming after stream 1 left"
    ]


def test_an_early_finish_must_leave_someone_decoding():
    assert missing(transition("early-finish-3"), [stream(1, 9), stream(1, 2), stream(1, 2)]) == []
    found = missing(transition("early-finish-3"), [stream(1, 2), stream(1, 3), stream(1, 2.5)])
    assert found == ["nobody was streaming after stream 1 left"]
