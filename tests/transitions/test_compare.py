# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omni_speech_accel.transitions.client import Ending, StreamRecord
from omni_speech_accel.transitions.compare import (
    MIN_SWAP_SAMPLES,
    Fault,
    Status,
    Tolerance,
    decode,
    judge_stream,
    measure,
    noise_floor,
)

EXACT = Tolerance()
pcm_arrays = hnp.arrays(np.int16, st.integers(1, 400))


def record(pcm: np.ndarray, ending: Ending = Ending.COMPLETE, rate: int | None = 24_000) -> StreamRecord:
    return StreamRecord(ending=ending, status=200, pcm=pcm.astype("<i2").tobytes(), sample_rate=rate, channels=1)


def speech(seed: int, samples: int = 2400) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8000, 8000, samples, dtype=np.int16)


def judge(candidate: StreamRecord, *baseline_runs: list[StreamRecord], index: int = 0, tolerance: Tolerance = EXACT):
    return judge_stream(index, baseline_runs, candidate, tolerance)


@given(pcm_arrays)
def test_a_stream_is_at_no_distance_from_itself(pcm):
    distance = measure(pcm, pcm, EXACT)
    assert (distance.max_lsb, distance.first, distance.length) == (0, None, 0)
    assert distance.snr_db == math.inf
    assert judge(record(pcm), [record(pcm)], [record(pcm)]).status is Status.OK


@given(pcm_arrays, pcm_arrays)
def test_distance_is_symmetric_in_everything_but_the_snr(first, second):
    there, back = measure(first, second, EXACT), measure(second, first, EXACT)
    assert (there.max_lsb, there.first, there.length) == (back.max_lsb, back.first, -back.length)


def test_full_scale_differences_do_not_wrap_around():
    low, high = np.array([-32768], np.int16), np.array([32767], np.int16)
    assert measure(low, high, EXACT).max_lsb == 65535


@given(pcm_arrays, st.data())
def test_one_changed_sample_is_found_where_it_is(pcm, data):
    at = data.draw(st.integers(0, len(pcm) - 1))
    step = data.draw(st.integers(1, 1000))
    changed = pcm.copy()
    changed[at] = pcm[at] - step if pcm[at] > 0 else pcm[at] + step
    distance = measure(pcm, changed, EXACT)
    assert (distance.first, distance.max_lsb) == (at, step)
    assert judge(record(changed), [record(pcm)]).fault is Fault.PCM
    assert judge(record(changed), [record(pcm)], tolerance=Tolerance(lsb=step)).status is Status.OK
    assert judge(record(changed), [record(pcm)], tolerance=Tolerance(lsb=step - 1)).status is Status.FAIL


@given(hnp.arrays(np.int16, st.integers(2, 400)), st.data())
def test_every_proper_prefix_is_truncated_never_anything_else(pcm, data):
    cut = data.draw(st.integers(1, len(pcm) - 1))
    verdict = judge(record(pcm[:cut]), [record(pcm)], [record(pcm)])
    assert (verdict.status, verdict.fault) == (Status.FAIL, Fault.TRUNCATED)
    assert verdict.distance.length == cut - len(pcm)


@given(pcm_arrays, hnp.arrays(np.int16, st.integers(1, 50)))
def test_anything_appended_is_a_wrong_length(pcm, more):
    verdict = judge(record(np.concatenate([pcm, more])), [record(pcm)])
    assert (verdict.status, verdict.fault) == (Status.FAIL, Fault.LENGTH)


def test_a_short_stream_that_is_no_prefix_is_a_wrong_length():
    pcm = speech(1)
    without_middle = np.concatenate([pcm[:600], pcm[1200:]])
    assert judge(record(without_middle), [record(pcm)]).fault is Fault.LENGTH


def test_durations_within_the_tolerance_pass_and_beyond_it_fail():
    pcm, tolerance = speech(1, 2400), Tolerance(duration_s=0.01)
    assert judge(record(pcm[:2160]), [record(pcm)], tolerance=tolerance).status is Status.OK
    assert judge(record(pcm[:2159]), [record(pcm)], tolerance=tolerance).fault is Fault.TRUNCATED


def test_snr_accepts_a_distance_that_the_lsb_bound_does_not():
    pcm = speech(1)
    near = (pcm.astype(np.int32) + 5).astype(np.int16)
    distance = measure(pcm, near, EXACT)
    assert judge(record(near), [record(pcm)], tolerance=Tolerance(snr_db=distance.snr_db - 0.1)).status is Status.OK
    assert judge(record(near), [record(pcm)], tolerance=Tolerance(snr_db=distance.snr_db + 0.1)).fault is Fault.PCM


def test_noise_where_the_baseline_is_silent_has_no_snr_to_pass_by():
    silence, hiss = np.zeros(600, np.int16), np.ones(600, np.int16)
    assert measure(silence, hiss, EXACT).snr_db == -math.inf
    assert judge(record(hiss), [record(silence)], tolerance=Tolerance(snr_db=10)).fault is Fault.PCM


def test_without_pcm_only_completeness_and_duration_count():
    deaf = Tolerance(pcm=False)
    assert judge(record(speech(1)), [record(speech(2))], tolerance=deaf).status is Status.OK
    assert judge(record(speech(1, 2000)), [record(speech(2))], tolerance=deaf).status is Status.FAIL
    assert judge(record(speech(1), Ending.CUT), [record(speech(1))], tolerance=deaf).fault is Fault.CUT


@pytest.mark.parametrize(
    ("ending", "fault"),
    [
        (Ending.CUT, Fault.CUT),
        (Ending.ERROR_IN_BODY, Fault.ERROR_IN_BODY),
        (Ending.MALFORMED, Fault.MALFORMED),
        (Ending.HTTP_ERROR, Fault.HTTP_ERROR),
        (Ending.TIMEOUT, Fault.TIMEOUT),
    ],
)
def test_a_bad_ending_fails_even_if_every_sample_arrived(ending, fault):
    pcm = speech(1)
    assert judge(record(pcm, ending), [record(pcm)]).fault is fault
    assert judge(record(pcm), [record(pcm, ending)]).fault is Fault.BASELINE_BROKEN


def test_a_complete_stream_without_audio_is_no_success():
    empty = record(np.zeros(0, np.int16))
    assert judge(empty, [record(speech(1))]).fault is Fault.NO_AUDIO
    assert judge(empty, [empty]).fault is Fault.BASELINE_BROKEN


def test_half_a_sample_is_malformed_unless_the_client_left():
    pcm = speech(1)
    odd = replace(record(pcm), pcm=record(pcm).pcm[:-1])
    assert judge(odd, [record(pcm)]).fault is Fault.MALFORMED
    assert judge(replace(odd, ending=Ending.CANCELLED), [record(pcm, Ending.CANCELLED)]).status is Status.OK


def test_a_baseline_whose_own_runs_state_different_formats_is_not_the_candidates_fault():
    audio = speech(1)
    runs = [[record(audio, rate=rate)] for rate in (24_000, 48_000)]
    verdict = judge(record(audio), *runs)
    assert (verdict.status, verdict.fault) == (Status.INCONCLUSIVE, Fault.NOISE)
    assert "24000 Hz x 1 channels and 48000 Hz x 1 channels" in verdict.message
    assert judge(record(audio, Ending.CUT), *runs).fault is Fault.CUT


def test_another_sample_rate_is_named_and_an_unstated_one_is_not_held_against_it():
    pcm = speech(1)
    verdict = judge(record(pcm, rate=16_000), [record(pcm)])
    assert (verdict.fault, verdict.message) == (
        Fault.FORMAT,
        "16000 Hz x 1 channels where the baseline sends 24000 Hz x 1 channels",
    )
    assert judge(record(pcm, rate=None), [record(pcm)]).status is Status.OK


@given(st.integers(2, 6), st.data())
def test_swapped_streams_are_named(count, data):
    streams = [record(speech(index)) for index in range(count)]
    index = data.draw(st.integers(0, count - 1))
    other = data.draw(st.integers(0, count - 1).filter(lambda value: value != index))
    verdict = judge(streams[other], streams, streams, index=index)
    assert verdict.fault is Fault.SWAPPED
    assert verdict.message == f"carries the audio of the baseline's stream {other}"


@given(st.integers(1, 2400 - MIN_SWAP_SAMPLES))
def test_rows_swapped_in_mid_stream_are_named_with_the_moment(at):
    streams = [record(speech(index)) for index in range(3)]
    mixed = np.concatenate([speech(0)[:at], speech(2)[at:]])
    verdict = judge(record(mixed), streams, index=0)
    assert verdict.fault is Fault.SWAPPED
    assert "stream 2 from " in verdict.message


def test_a_shorter_stream_of_another_row_is_swapped_rather_than_a_wrong_length():
    streams = [record(speech(0, 4800)), record(speech(1, 2400))]
    assert judge(streams[1], streams, index=0).fault is Fault.SWAPPED
    assert judge(streams[0], streams, index=1).fault is Fault.SWAPPED


def test_equal_streams_are_never_called_swapped():
    streams = [record(speech(0)), record(speech(0)), record(speech(1))]
    assert all(judge(item, streams, index=index).status is Status.OK for index, item in enumerate(streams))


def test_silence_is_nobodys_audio():
    silent = record(np.zeros(2400, np.int16))
    assert judge(silent, [record(speech(0)), silent], index=0).fault is Fault.PCM


def test_a_cut_stream_with_anothers_audio_says_both():
    streams = [record(speech(0)), record(speech(1))]
    verdict = judge(replace(streams[1], ending=Ending.CUT, detail="broke"), streams, index=0)
    assert verdict.fault is Fault.CUT
    assert verdict.message == "broke; it carries the audio of the baseline's stream 1"


@given(pcm_arrays, st.data())
def test_of_a_cancelled_stream_the_shared_prefix_counts(pcm, data):
    lengths = st.integers(1, len(pcm))
    ours = record(pcm[: data.draw(lengths)], Ending.CANCELLED)
    theirs = record(pcm[: data.draw(lengths)], Ending.CANCELLED)
    assert judge(ours, [theirs], [theirs]).status is Status.OK
    wrong = pcm[: len(ours.pcm) // 2].copy()
    wrong[0] ^= 1
    assert judge(record(wrong, Ending.CANCELLED), [theirs]).status is Status.FAIL


def test_a_stream_that_completes_before_the_point_where_the_baselines_client_left_is_truncated():
    pcm = speech(1)
    left = record(pcm[:1800], Ending.CANCELLED)
    assert judge(record(pcm[:1200]), [left]).fault is Fault.TRUNCATED
    assert judge(record(pcm), [left]).status is Status.OK


def test_a_cancelled_stream_longer_than_the_baselines_whole_is_a_wrong_length():
    pcm = speech(1)
    assert judge(record(pcm, Ending.CANCELLED), [record(pcm[:1200])]).fault is Fault.LENGTH
    assert judge(record(pcm[:1200], Ending.CANCELLED), [record(pcm)]).status is Status.OK


def noisy(pcm: np.ndarray, lsb: int, seed: int) -> np.ndarray:
    return (pcm.astype(np.int32) + np.random.default_rng(seed).choice([-lsb, lsb], len(pcm))).astype(np.int16)


@given(st.integers(1, 200), st.integers(0, 50), st.integers(51, 99))
def test_what_lies_within_the_baselines_own_noise_is_never_blamed(lsb, first, second):
    pcm = speech(1)
    runs = [[record(noisy(pcm, lsb, first))], [record(noisy(pcm, lsb, second))]]
    verdict = judge(record(noisy(pcm, lsb, 100)), *runs)
    assert (verdict.status, verdict.fault) == (Status.INCONCLUSIVE, Fault.NOISE)
    assert verdict.noise.max_lsb == 2 * lsb
    assert f"up to {2 * lsb} LSB" in verdict.message


def test_what_lies_far_beyond_the_noise_is_blamed():
    pcm = speech(1)
    runs = [[record(noisy(pcm, 2, 1))], [record(noisy(pcm, 2, 2))]]
    bad = pcm.copy()
    bad[1200] = -bad[1200] - 100
    assert judge(record(bad), *runs).fault is Fault.PCM


def test_matching_any_one_run_of_a_baseline_that_varies_is_enough():
    runs = [[record(speech(1))], [record(speech(2))]]
    assert judge(record(speech(2)), *runs).status is Status.OK
    assert judge(record(speech(3)), *runs).fault is Fault.NOISE


def test_a_baseline_whose_length_varies_is_reported_not_the_candidate():
    pcm = speech(1)
    runs = [[record(pcm)], [record(pcm[:2000])]]
    verdict = judge(record(pcm[:1800]), *runs)
    assert (verdict.status, verdict.fault) == (Status.INCONCLUSIVE, Fault.NOISE)
    assert "differ by 400 samples" in verdict.message
    assert judge(record(pcm[:500]), *runs).fault is Fault.TRUNCATED


def test_a_baseline_whose_length_alone_varies_excuses_no_other_samples():
    pcm = speech(1)
    runs = [[record(pcm)], [record(pcm[:2000])]]
    assert judge(record(speech(2)), *runs).fault is Fault.PCM


def test_the_noise_floor_is_the_worst_of_all_pairs_and_none_with_one_run():
    pcm = speech(1)
    runs = [[record(pcm)], [record(pcm + 1)], [record(pcm - 4)]]
    assert noise_floor(0, runs, EXACT).max_lsb == 5
    assert noise_floor(0, runs[:1], EXACT) is None


def test_clients_that_left_at_different_moments_are_no_noise():
    pcm = speech(1)
    runs = [[record(pcm[:1000], Ending.CANCELLED)], [record(pcm[:2000], Ending.CANCELLED)]]
    floor = noise_floor(0, runs, EXACT)
    assert (floor.max_lsb, floor.length) == (0, 0)
    wrong = pcm[:1500].copy()
    wrong[10] ^= 1
    assert judge(record(wrong, Ending.CANCELLED), *runs).fault is Fault.PCM


def test_decode_reads_little_endian_and_drops_half_a_sample():
    assert decode(StreamRecord(pcm=b"\x01\x00\xff\xff\x07")).tolist() == [1, -1]
