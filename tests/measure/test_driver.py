# SPDX-License-Identifier: Apache-2.0
"""The driver against the stock stage: payloads as the engine sends them, and each stream on its own reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_speech_accel import environment
from omni_speech_accel.errors import ReferenceMixup, Unavailable
from omni_speech_accel.measure.driver import Code2WavDriver, Payload, ready_platform, stream_payloads
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.plugin.settings import SettingsError
from omni_speech_accel.synthetic.references import REFERENCE_RATE, Reference, distinct_references

PROFILE = StageProfile("test", {"codec_chunk_frames": 4, "codec_left_context_frames": 2})


def test_payloads_repeat_the_context_and_carry_every_code_once() -> None:
    reference = distinct_references(1, 1.0)[0]
    payloads = stream_payloads("s", list(range(10)), PROFILE, reference)
    assert [payload.codes for payload in payloads] == [
        (4218, 4218, 0, 1, 2, 3),
        (2, 3, 4, 5, 6, 7),
        (6, 7, 8, 9),
    ]
    assert [payload.sequence for payload in payloads] == [0, 1, 2]
    assert [payload.last for payload in payloads] == [False, False, True]
    assert [payload.reference for payload in payloads] == [reference, None, None]


def test_silence_code_is_the_hosts() -> None:
    from vllm_omni.model_executor.stage_input_processors import minicpmo_4_5_omni

    from omni_speech_accel.measure.driver import SILENCE_CODE

    assert minicpmo_4_5_omni._MINICPMO45_SILENCE_CODE == SILENCE_CODE


def test_reference_rides_on_the_first_payload_only() -> None:
    reference = distinct_references(1, 1.0)[0]
    first, second, *_ = (payload.info() for payload in stream_payloads("s", list(range(12)), PROFILE, reference))
    assert first["meta"]["ref_audio_sr"] == REFERENCE_RATE
    assert torch.equal(first["codes"]["ref"], torch.from_numpy(reference.samples))
    assert "ref" not in second["codes"]
    assert second["meta"]["chunk_seq"] == 1


def test_a_directory_that_is_no_model_is_named(tmp_path: Path, profile: StageProfile) -> None:
    with pytest.raises(Unavailable, match=r"lacks assets/HT_ref_audio\.wav"):
        Code2WavDriver(tmp_path, profile)


def test_a_wrong_block_stops_the_build(small_checkpoint: Path, profile: StageProfile) -> None:
    with pytest.raises(SettingsError, match="s3_grap"):
        Code2WavDriver(small_checkpoint, profile, block={"s3_grap": True})


def test_another_device_than_the_hosts_is_refused(platform: str) -> None:
    assert platform == "cpu"
    with pytest.raises(Unavailable, match="runs on cpu in this environment, not on cuda"):
        ready_platform("cuda")


def test_the_kill_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.KILL_SWITCH, "0")
    with pytest.raises(Unavailable, match=environment.KILL_SWITCH):
        ready_platform()


@pytest.fixture
def running(stock_stage: Code2WavDriver, profile: StageProfile) -> Iterator[tuple[Code2WavDriver, list[str]]]:
    """A stage after the first chunk of four streams: two voices, one of them twice, and the default voice."""
    first, second = distinct_references(2, profile.reference_seconds)
    given = {"first": first, "second": second, "first again": first, "default": None}
    codes = list(range(100, 120))
    stock_stage.step([stream_payloads(name, codes, profile, reference)[0] for name, reference in given.items()])
    names = list(given)
    yield stock_stage, names
    stock_stage.finish(names)


def test_streams_use_the_references_that_they_were_given(running: tuple[Code2WavDriver, list[str]]) -> None:
    stage, names = running
    stage.check_references(names)


def test_a_stream_on_another_streams_reference_is_found(running: tuple[Code2WavDriver, list[str]]) -> None:
    stage, names = running
    states = stage.model._states
    states["second"] = replace(
        states["second"], prompt_cache_id=states["first"].prompt_cache_id, prompt_wav=states["first"].prompt_wav
    )
    with pytest.raises(ReferenceMixup, match=r"stream second was given .* holds other audio"):
        stage.check_references(names)


def test_a_reference_that_is_ignored_for_the_default_voice_is_found(running: tuple[Code2WavDriver, list[str]]) -> None:
    stage, names = running
    states = stage.model._states
    default = states["default"]
    states["first"] = replace(states["first"], prompt_cache_id=default.prompt_cache_id, prompt_wav=default.prompt_wav)
    with pytest.raises(ReferenceMixup, match="stream first"):
        stage.check_references(names)


def test_the_last_voice_instead_of_the_default_one_is_found(running: tuple[Code2WavDriver, list[str]]) -> None:
    stage, names = running
    states = stage.model._states
    states["default"] = replace(
        states["default"], prompt_cache_id=states["first"].prompt_cache_id, prompt_wav=states["first"].prompt_wav
    )
    with pytest.raises(ReferenceMixup, match="stream default was given no reference"):
        stage.check_references(names)


def test_features_under_the_wrong_key_are_found(running: tuple[Code2WavDriver, list[str]]) -> None:
    stage, names = running
    key = next(key for key in stage.backend._prompt_features if key[0] == stage.model._states["second"].prompt_cache_id)
    kept = stage.backend._prompt_features.pop(key)
    try:
        with pytest.raises(ReferenceMixup, match="has no features in the stage"):
            stage.check_references(names)
    finally:
        stage.backend._prompt_features[key] = kept


def test_a_shared_cache_entry_of_two_references_is_found(
    running: tuple[Code2WavDriver, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, names = running
    states = stage.model._states
    states["second"] = replace(
        states["second"], prompt_cache_id=states["first"].prompt_cache_id, prompt_wav=states["first"].prompt_wav
    )
    monkeypatch.setattr(stage, "_check_file", lambda *args: None)
    with pytest.raises(ReferenceMixup, match="shares the features"):
        stage.check_references(names)


def test_a_finished_stream_cannot_be_checked(stock_stage: Code2WavDriver) -> None:
    with pytest.raises(ReferenceMixup, match="no state"):
        stock_stage.check_references(["never seen"])


def test_a_reference_at_another_rate_cannot_be_checked_by_its_samples(
    stock_stage: Code2WavDriver, profile: StageProfile
) -> None:
    samples = distinct_references(1, 1.0)[0].samples[::2]
    low = Reference("12 kHz", np.ascontiguousarray(samples), 12000)
    stock_stage.step([Payload("low", 0, tuple(range(100, 113)), low)])
    try:
        with pytest.raises(ReferenceMixup, match="was given 12000 Hz"):
            stock_stage.check_references(["low"])
    finally:
        stock_stage.finish(["low"])
