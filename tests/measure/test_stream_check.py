# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from omni_speech_accel.measure import stream_check
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.measure.stream_check import CHUNKS, scenario
from omni_speech_accel.synthetic.references import Reference, distinct_references

PROFILE = StageProfile("test", {"codec_chunk_frames": 10, "codec_left_context_frames": 3})


def references() -> list[Reference]:
    return distinct_references(3, 1.0)


def test_scenario_mixes_voices_joins_late_and_ends_early_and_short() -> None:
    steps = scenario(PROFILE, references())
    running = [{payload.stream for payload in step} for step in steps]
    assert running[0] == {"first", "second", "first again", "default voice"}
    assert running[1] == running[0] | {"late"}
    assert "first again" not in running[2]
    assert len(steps) == CHUNKS
    lengths = [{len(payload.codes) for payload in step} for step in steps]
    assert len(lengths[-1]) > 1
    given = {payload.stream: payload.reference for step in steps for payload in step if payload.sequence == 0}
    assert given["default voice"] is None
    assert given["first"] is given["first again"]
    assert len({id(reference) for reference in given.values()}) == 4


def test_every_stream_ends_and_says_so_once() -> None:
    steps = scenario(PROFILE, references())
    streams = {payload.stream for step in steps for payload in step}
    last = [payload.stream for step in steps for payload in step if payload.last]
    assert sorted(last) == sorted(streams)


def test_streams_say_different_things() -> None:
    steps = scenario(PROFILE, references())
    assert len({payload.codes for payload in steps[0]}) == len(steps[0])


def test_tolerance_is_each_networks_widest_spread_where_that_is_wider_than_rounding() -> None:
    spread = {"estimator_att_cache": 3e-5, "estimator_cnn_cache": 0.0, "mel": 1e-7, "audio": 1e-6}
    for name in ("estimator_att_cache", "estimator_cnn_cache", "mel", "never measured"):
        assert stream_check._tolerance(name, spread).relative == stream_check.SPREAD_FACTOR * 3e-5
    assert stream_check._tolerance("audio", spread).relative == stream_check.VOCODER_FLOOR
    assert stream_check._tolerance("mel", {"audio": 1.0}).relative == stream_check.FLOOR
    assert stream_check._tolerance("speech", {"audio": 1.0}).relative == stream_check.SPREAD_FACTOR
