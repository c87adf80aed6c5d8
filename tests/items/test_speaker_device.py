# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import soundfile
import torch
from torch.nn.functional import cosine_similarity as cosine

from omni_speech_accel.campplus.model import Campplus
from omni_speech_accel.items import speaker_device
from omni_speech_accel.plugin.session import session_of, use_session
from omni_speech_accel.synthetic.references import speech
from omni_speech_accel.tolerance import Tolerance
from tests.campplus.conftest import SHORT, SHORT_FRAMES, TOLERANCES
from tests.items.conftest import drop_chunk_buffers, only, session_for

KEY = "speaker_device"


def within(on: torch.Tensor, stock: torch.Tensor, allowed: Tolerance) -> bool:
    """In double precision: a float32 cosine of equal vectors is 6e-8 off."""
    on, stock = on.double(), stock.double()
    return allowed.allows(float((on - stock).norm() / stock.norm()), float(cosine(on, stock)))


@pytest.fixture(scope="module")
def core(core_factory: Any) -> Any:
    return core_factory(session_for(only(KEY)))


@pytest.mark.parametrize("frames", [20, 99, 198, 400, 598, 733])
def test_the_embedding_is_stocks_within_the_stated_tolerance(core: Any, stock_core: Any, frames: int) -> None:
    feature = torch.randn(frames, 80, generator=torch.Generator().manual_seed(frames))
    on, stock = core._forward_spk_embedding(feature), stock_core._forward_spk_embedding(feature)
    assert isinstance(core._spk_model, Campplus)
    assert isinstance(stock_core.spk_model, onnxruntime.InferenceSession)
    assert (on.shape, on.dtype, on.device) == (stock.shape, stock.dtype, stock.device)
    allowed = SHORT if frames < SHORT_FRAMES else TOLERANCES.full
    assert within(on, stock, allowed)


def test_the_other_prompt_features_are_untouched(core: Any, stock_core: Any, wav: Any) -> None:
    path = wav(1.2)
    on, stock = core._prepare_prompt(path), stock_core._prepare_prompt(path)
    for index in (0, 1, 3, 4):
        assert torch.equal(on[index], stock[index])


def test_each_embedding_of_our_model_is_counted(quick_core: Any) -> None:
    session = session_for(only(KEY))
    core = quick_core(session)
    core._forward_spk_embedding(torch.randn(60, 80))
    core._forward_spk_embedding(torch.randn(60, 80))
    assert session.snapshot() == {KEY: {"calls": 2}}


def test_a_core_without_the_item_keeps_onnxruntime(quick_core: Any) -> None:
    off = quick_core(session_for(only()))
    assert isinstance(off.spk_model, onnxruntime.InferenceSession)


@pytest.fixture
def broken_checkpoint(small_checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with a campplus.onnx of its own, to be damaged."""
    target = tmp_path / "token2wav"
    target.mkdir()
    for source in (small_checkpoint / "assets" / "token2wav").iterdir():
        if source.name == "campplus.onnx":
            shutil.copy(source, target / source.name)
        else:
            (target / source.name).symlink_to(source.resolve())
    return target


def load(directory: Path) -> Any:
    from vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav import StepAudio2Token2WavCore

    session = session_for(only(KEY))
    with use_session(session):
        core = StepAudio2Token2WavCore(str(directory), device="cpu", n_timesteps=2)
    core._ensure_models_loaded()
    drop_chunk_buffers(core)
    return core


def test_a_model_outside_the_parity_gate_is_not_applied_and_says_so(
    core_factory: Any, broken_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_speech_accel.campplus import model as campplus

    build = campplus.build_campplus

    def perturbed(*args: Any) -> Campplus:
        made = build(*args)
        with torch.no_grad():
            max(made.model.buffers(), key=lambda value: value.numel()).mul_(1.01)
        return made

    monkeypatch.setattr(campplus, "build_campplus", perturbed)
    core = load(broken_checkpoint)
    session = session_of(core)
    assert session is not None
    assert not session.on(KEY)
    assert "CampplusParityError" in session.not_applied[KEY]
    assert isinstance(core.spk_model, onnxruntime.InferenceSession)


def test_a_file_of_another_format_is_not_applied_and_stock_serves(core_factory: Any, broken_checkpoint: Path) -> None:
    import onnx

    path = broken_checkpoint / "campplus.onnx"
    model = onnx.load(str(path))
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "HardSigmoid"
    onnx.save(model, str(path))
    core = load(broken_checkpoint)
    session = session_of(core)
    assert session is not None
    assert "CampplusFormatError" in session.not_applied[KEY]
    assert torch.isfinite(core._forward_spk_embedding(torch.randn(100, 80))).all()


def test_a_device_model_that_the_host_installed_is_kept() -> None:
    session = session_for(only(KEY))
    own = SimpleNamespace(model=torch.nn.Identity())
    core = SimpleNamespace(_models_loaded=False, _spk_model=own, _audio_tokenizer=SimpleNamespace())

    def stock_load() -> None:
        core._models_loaded = True

    speaker_device.ensure_models_loaded(session.item(KEY), stock_load, core)
    assert core._spk_model is own
    assert session.not_applied[KEY] == "the host's own SimpleNamespace serves"


def test_later_hosts_keyword_arguments_are_taken_where_the_host_lacks_them() -> None:
    session = session_for(only(KEY))
    core = SimpleNamespace(device=torch.device("npu" if hasattr(torch, "npu") else "cpu"), _spk_model=None)
    calls: list[dict[str, Any]] = []

    def without() -> None:
        calls.append({})

    def with_keywords(*, cpu_reference: bool = False, use_trt: bool = True) -> None:
        calls.append({"cpu_reference": cpu_reference, "use_trt": use_trt})

    speaker_device.enable_trt_spk_embedding(session.item(KEY), without, core, **{"cpu_reference": True})
    speaker_device.enable_device_spk_embedding(session.item(KEY), without, core, **{"use_trt": False})
    speaker_device.enable_trt_spk_embedding(session.item(KEY), with_keywords, core, **{"cpu_reference": True})
    speaker_device.enable_device_spk_embedding(session.item(KEY), with_keywords, core, **{"use_trt": False})
    assert calls == [
        {},
        {},
        {"cpu_reference": True, "use_trt": True},
        {"cpu_reference": False, "use_trt": False},
    ]


def test_an_unknown_keyword_is_still_an_error() -> None:
    def without() -> None: ...

    with pytest.raises(TypeError):
        speaker_device.enable_trt_spk_embedding(
            session_for(only(KEY)).item(KEY), without, SimpleNamespace(), cpu_refrence=True
        )


def test_a_cuda_core_that_declines_tensorrt_gets_our_model(
    small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = object()
    monkeypatch.setattr("omni_speech_accel.campplus.model.load_campplus", lambda *args: ours)
    core = SimpleNamespace(
        device=torch.device("cuda"), model_path=str(small_checkpoint / "assets" / "token2wav"), _spk_model=None
    )

    def stock() -> None:
        raise AssertionError("TensorRT was declined")

    speaker_device.enable_device_spk_embedding(session_for(only(KEY)).item(KEY), stock, core, use_trt=False)
    assert core._spk_model is ours


def test_with_trained_weights_the_pipelines_embeddings_are_stocks_and_tell_voices_apart(
    core_factory: Any, stock_core: Any, broken_checkpoint: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(trained["folded-13"], broken_checkpoint / "campplus.onnx")
    core = load(broken_checkpoint)
    assert isinstance(core._spk_model, Campplus)
    stock = copy.copy(core)
    stock._spk_model = onnxruntime.InferenceSession(
        str(broken_checkpoint / "campplus.onnx"), providers=["CPUExecutionProvider"]
    )
    same, other = [], []
    embeddings = []
    for voice in speech(16000):
        halves = []
        for part in np.array_split(voice.samples, 2):
            path = str(tmp_path / f"{len(embeddings)}{len(halves)}.wav")
            soundfile.write(path, part, 16000)
            on, off = core._prepare_prompt(path)[2], stock._prepare_prompt(path)[2]
            assert within(on, off, TOLERANCES.full)
            halves.append(on)
        same.append(float(cosine(*halves)))
        other += [float(cosine(one, halves[0])) for one in embeddings]
        embeddings.append(halves[0])
    assert min(same) > 0.6
    assert max(other) < 0.4


def test_a_cuda_core_that_declines_tensorrt_keeps_the_cpu_session_where_our_model_failed_its_check(
    small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("parity")

    monkeypatch.setattr("omni_speech_accel.campplus.model.load_campplus", refuse)
    session = session_for(only(KEY))
    core = SimpleNamespace(
        device=torch.device("cuda"), model_path=str(small_checkpoint / "assets" / "token2wav"), _spk_model=None
    )

    def stock() -> None:
        raise AssertionError("TensorRT was declined")

    for _ in range(2):  # The second call comes with the item out of the stage.
        speaker_device.enable_device_spk_embedding(session.item(KEY), stock, core, use_trt=False)
        assert core._spk_model is None
    assert "parity" in session.not_applied[KEY]


def test_the_switches_are_still_answered_once_the_item_is_out(quick_core: Any) -> None:
    core = quick_core(session_for(only(KEY)))
    if not hasattr(core, "enable_device_spk_embedding"):
        pytest.skip("this host has no device switch")
    session = session_of(core)
    assert session is not None
    session.reject(KEY, "parity")
    core._spk_model, core.device = None, torch.device("cuda")
    core.enable_device_spk_embedding(use_trt=False)
    assert core._spk_model is None
