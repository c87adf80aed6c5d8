# SPDX-License-Identifier: Apache-2.0
"""The host under test is a real one, on the real device, and its stock stage speaks there."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from pathlib import Path

import pytest
import torch

from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.table import FISH_OMNI, PATCHES
from omni_speech_accel.synthetic.references import distinct_references
from tests.gpu import harness
from tests.gpu.conftest import Code2WavFactory

pytestmark = [pytest.mark.gpu, pytest.mark.npu]

SPEECH_MODULES = sorted(
    {
        symbol.module
        for patch in PATCHES
        if FISH_OMNI not in patch.acts and fit(patch).applies
        for symbol in patch.symbols
    }
)


def test_the_host_runs_on_the_accelerator(platform: str, device: torch.device) -> None:
    from vllm_omni.platforms import current_omni_platform

    assert current_omni_platform.device_type == platform == device.type
    assert platform in ("cuda", "npu")


@pytest.mark.skipif("OSA_PACK_HOST" not in os.environ, reason="the host is installed here, not packed")
def test_a_packed_host_is_the_one_that_was_asked_for(platform: str) -> None:
    import vllm
    import vllm_omni

    assert metadata.version("vllm-omni") == os.environ["OSA_PACK_HOST"]
    # Platform detection reads "cpu" in the version as a build for CPUs.
    assert "cpu" not in metadata.version("vllm")
    root = Path(os.environ["OSA_PACK_ROOT"])
    for package in (vllm, vllm_omni):
        assert root in Path(str(package.__file__)).parents


@pytest.mark.parametrize("module", SPEECH_MODULES)
def test_a_module_that_a_patch_names_imports(module: str, platform: str) -> None:
    importlib.import_module(module)


def test_stock_speaks_on_the_device(code2wav_factory: Code2WavFactory, device: torch.device) -> None:
    """One test, since the first forward captures the shipped graphs, up to half a minute of work."""
    stage = code2wav_factory()
    assert stage.device.type == device.type
    references = distinct_references(2, 6.0)
    streams = harness.random_streams("speaks", 2, stage.profile, references)
    names = [stream[0].stream for stream in streams]

    first = harness.forward(stage, [stream[0] for stream in streams])
    assert {audio.device.type for audio in first} == {device.type}
    stage.check_references(names)
    stage.finish(names)

    spoken = harness.speak(stage, streams)
    for audio, stream in zip(spoken, streams, strict=True):
        assert audio.numel() == harness.stream_samples(stream)
        assert torch.isfinite(audio).all()
        assert audio.abs().max() > 1e-3
    assert not torch.equal(spoken[0], spoken[1])

    # The floor under every comparison with stock here: the same seed gives the same vocoder noise. Of warm shapes: the
    # first use of one is captured, and 0.30.0 draws noise in the warm-up of a capture, so that use has other noise.
    spoken = harness.speak(stage, streams)
    for once, again in zip(spoken, harness.speak(stage, streams), strict=True):
        assert (once - again).norm() <= 1e-4 * once.norm()
