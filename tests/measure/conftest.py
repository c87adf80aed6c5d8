# SPDX-License-Identifier: Apache-2.0
"""The real host on CPU, with the plugin on for a whole module."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_speech_accel import plugin
from omni_speech_accel.measure.driver import Code2WavDriver, ready_platform
from omni_speech_accel.measure.stage_profile import StageProfile, stage_profile


@pytest.fixture(scope="module")
def platform() -> Iterator[str]:
    """The device type that the host reports here, with the plugin registered before its import."""
    yield ready_platform()
    plugin.unregister()


@pytest.fixture(scope="module")
def profile(platform: str) -> StageProfile:
    """The CPU profile with shorter chunks and references: a vocoder frame costs 10 ms here."""
    return stage_profile(platform, {"codec_chunk_frames": 5, "ref_audio_max_seconds": 1.0})


@pytest.fixture(scope="module")
def stock_stage(platform: str, profile: StageProfile, small_checkpoint: Path) -> Iterator[Code2WavDriver]:
    driver = Code2WavDriver(small_checkpoint, profile)
    yield driver
    driver.close()
    gc.collect()
