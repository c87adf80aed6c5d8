# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import soundfile

from omni_speech_accel.synthetic import references
from omni_speech_accel.synthetic.references import REFERENCE_RATE, distinct_references, reference_files, speech


def test_speech_is_speech_at_the_asked_rate() -> None:
    for voice in speech(16000):
        assert voice.rate == 16000
        assert voice.seconds > 3.0
        assert 0.01 < float(np.abs(voice.samples).max()) <= 1.0


def test_no_two_references_hold_the_same_audio_in_a_take_or_across_takes() -> None:
    voices = speech()
    pieces = [piece for take in range(4) for piece in distinct_references(3, 2.0, take=take, voices=voices)]
    assert {len(piece.samples) for piece in pieces} == {2 * REFERENCE_RATE}
    for first, second in combinations(pieces, 2):
        assert not np.array_equal(first.samples, second.samples)


def test_a_take_is_the_same_every_time() -> None:
    first, second = (distinct_references(2, 1.0, take=3) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one.samples, other.samples)


def test_speech_shorter_than_asked_is_repeated() -> None:
    (piece,) = distinct_references(1, 40.0)
    assert piece.seconds == pytest.approx(40.0)


def test_reference_files_cover_what_people_send(tmp_path: Path) -> None:
    infos = [soundfile.info(path) for _, path in reference_files(tmp_path)]
    assert {info.samplerate for info in infos} >= {8000, 16000, 24000, 44100, 48000}
    assert {info.subtype for info in infos} >= {"PCM_16", "PCM_24", "FLOAT"}
    assert {info.format for info in infos} == {"WAV", "FLAC"}
    assert {info.channels for info in infos} == {1, 2}
    durations = sorted(round(info.duration, 1) for info in infos)
    assert durations[0] <= 1.0
    # 30 s are the 3000 mel frames that the tokenizer takes in one window; longer audio runs its other path.
    assert 30.0 in durations
    assert durations[-1] > 30.0
    assert any(float(np.abs(soundfile.read(path)[0]).max()) == 0.0 for _, path in reference_files(tmp_path))


def test_another_rate_keeps_the_tones_that_it_can_hold_and_no_other() -> None:
    seconds = np.arange(48000) / 48000
    low, high = np.sin(2 * np.pi * 440 * seconds), np.sin(2 * np.pi * 9000 * seconds)
    found = references._stretch(low + high, 16000)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert float(np.abs(found - expected).max()) < 1e-9
