# SPDX-License-Identifier: Apache-2.0
"""The host's own Token2Wav core on the random checkpoint, with and without items."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from omni_speech_accel import plugin
from omni_speech_accel.plugin.session import StageSession, attach, use_session
from omni_speech_accel.plugin.settings import resolve
from tests.campplus.conftest import TOLERANCES
from tests.runtime.conftest import accelerator, device  # noqa: F401

CoreFactory = Callable[..., Any]


def session_for(block: Any, *, unfit: dict[str, str] | None = None) -> StageSession:
    """A session whose items are those of ``block``; ``None``: no block."""
    return StageSession(resolve(*([] if block is None else [("test", block)])), "test", unfit)


def only(*keys: str) -> dict[str, bool]:
    """A block with just these items on."""
    from omni_speech_accel.plugin.table import PATCHES

    return {patch.key: patch.key in keys for patch in PATCHES}


@pytest.fixture(autouse=True)
def _plugin_on_where_a_core_is_used(request: pytest.FixtureRequest) -> None:
    """Other tests of this process take the plugin off; a core's methods are wrapped only while it is on."""
    if {"core_factory", "quick_core", "stock_core"} & set(request.fixturenames):
        plugin.register()


@pytest.fixture(scope="session")
def core_factory(small_checkpoint: Path) -> Iterator[CoreFactory]:
    """Builds the host's ``StepAudio2Token2WavCore`` on CPU under a session; loading is part of it."""
    from vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav import StepAudio2Token2WavCore

    def build(session: StageSession | None = None) -> Any:
        plugin.register()
        with use_session(session):
            core = StepAudio2Token2WavCore(str(small_checkpoint / "assets" / "token2wav"), device="cpu", n_timesteps=2)
        core._ensure_models_loaded()
        drop_chunk_buffers(core)
        return core

    yield build
    plugin.unregister()


def drop_chunk_buffers(core: Any) -> None:
    """Free the upstream chunk buffers (2.1 GiB a core at full size), which prompt features never read."""
    for module in core._flow.modules():
        module._buffers.pop("att_cache_buffer", None)


@pytest.fixture(scope="session")
def stock_core(core_factory: CoreFactory) -> Any:
    """A core without a session: stock."""
    return core_factory()


@pytest.fixture(scope="session")
def quick_core(stock_core: Any) -> CoreFactory:
    """Like ``core_factory``, with the parts of the loaded stock core instead of a load of its own."""
    from omni_speech_accel.campplus.model import load_campplus

    def build(session: StageSession) -> Any:
        plugin.register()
        with use_session(session):
            core = type(stock_core)(stock_core.model_path, device="cpu", n_timesteps=2)
        core._audio_tokenizer = copy.deepcopy(stock_core._audio_tokenizer)
        core._flow, core._hift, core._models_loaded = stock_core._flow, stock_core._hift, True
        core._spk_model = stock_core.spk_model
        if session.on("speaker_device"):
            core._spk_model = load_campplus(Path(core.model_path) / "campplus.onnx", "cpu", TOLERANCES)
        attach(core._audio_tokenizer, session)
        return core

    return build


def speech(seconds: float, rate: int = 16000, seed: int = 0, channels: int = 1) -> np.ndarray:
    """Speech-like noise: a voiced tone under a syllable-rate envelope. ``[N]`` or ``[N, channels]`` float32."""
    generator = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    voice = sum(np.sin(2 * np.pi * 140 * harmonic * time) / harmonic for harmonic in range(1, 12))
    audio = 0.1 * voice * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * time)) + 0.01 * generator.standard_normal(time.size)
    audio = audio.astype(np.float32)
    return audio if channels == 1 else np.stack([audio * (1 - 0.3 * index) for index in range(channels)], axis=1)


@pytest.fixture
def wav(tmp_path: Path) -> Callable[..., str]:
    """Writes a reference file and returns its path."""

    def write(
        seconds: float = 2.0,
        rate: int = 16000,
        *,
        seed: int = 0,
        channels: int = 1,
        format: str = "WAV",
        subtype: str | None = None,
    ) -> str:
        path = tmp_path / f"ref_{seconds}_{rate}_{seed}_{channels}.{format.lower()}"
        soundfile.write(path, speech(seconds, rate, seed, channels), rate, format=format, subtype=subtype)
        return str(path)

    return write


def to_simulated(module: Any) -> None:
    """Move a module's parameters and buffers to the simulated device, which ``Module.to`` cannot."""
    from tests.simulator import DEVICE

    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, value in table.items():
                if value is not None:
                    table[name] = value.detach().to(DEVICE)


def simulate(core: Any) -> None:
    """Move what ``_prepare_prompt`` uses of a loaded core to the simulated device."""
    from omni_speech_accel.campplus.model import Campplus
    from tests.simulator import DEVICE

    core.device = DEVICE
    to_simulated(core._audio_tokenizer)
    core._audio_tokenizer.encoder.freqs_cis = core._audio_tokenizer.encoder.freqs_cis.to(DEVICE)
    if isinstance(core._spk_model, Campplus):
        model = copy.deepcopy(core._spk_model.model)  # The loaded one is shared by the process.
        to_simulated(model)
        moved = copy.copy(core._spk_model)
        moved.model, moved.device = model, DEVICE
        core._spk_model = moved
