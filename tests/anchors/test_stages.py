# SPDX-License-Identifier: Apache-2.0
"""Real stages of the host and what their sessions say: on an NPU too, its platform faked and its device simulated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel import plugin, runtime
from omni_speech_accel.anchors import stages
from omni_speech_accel.host.source import host_info
from omni_speech_accel.plugin.session import StageSession, session_of
from omni_speech_accel.runtime import RuntimeSetupError
from tests.items.conftest import drop_chunk_buffers, only, to_simulated
from tests.runtime.conftest import device  # noqa: F401
from tests.simulator import DEVICE, read

HOST = host_info().version
HAS_TORCH_CAMPPLUS = HOST != "0.30.0"

BuildStage = Callable[..., Any]


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The platform says NPU, the tensors stay on the host; yields what the accelerator seam was asked."""
    from vllm_omni.platforms import current_omni_platform
    from vllm_omni.platforms.npu.models import step_audio2_token2wav

    asked = SimpleNamespace(problem=None, checks=0)

    class Checked(type(runtime.accelerator_for("cpu"))):  # type: ignore[misc]
        def check_setup(self, where: Any) -> None:
            asked.checks += 1
            if asked.problem is not None:
                raise RuntimeSetupError(asked.problem)

    plugin.register()
    monkeypatch.setattr(type(current_omni_platform), "is_npu", lambda self: True)
    monkeypatch.setattr(stages, "device_type", lambda: "npu")
    monkeypatch.setattr(step_audio2_token2wav, "apply_step_audio2_token2wav_npu_patch", lambda: None)
    runtime.register_backend("npu", Checked)
    yield asked
    runtime.unregister_backend("npu")
    plugin.unregister()


@pytest.fixture
def code2wav(small_checkpoint: Path, stage_config: Any) -> BuildStage:
    def build(block: Any) -> Any:
        from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav import MiniCPMO45Code2Wav

        extra = {"token2wav_n_timesteps": 2, **({} if block is None else {"omni_speech_accel": block})}
        return MiniCPMO45Code2Wav(vllm_config=stage_config(small_checkpoint, extra=extra))

    return build


def loaded(stage: Any) -> Any:
    stage.load_weights(())
    drop_chunk_buffers(stage.backend._token2wav._core)
    return stage


def session(stage: Any) -> StageSession:
    found = session_of(stage)
    assert found is not None
    return found


def test_a_runtime_in_which_no_capture_can_be_right_stops_the_stage_before_it_is_built(
    npu: SimpleNamespace, code2wav: BuildStage
) -> None:
    npu.problem = "ASCEND_LAUNCH_BLOCKING=1 makes every launch wait: unset it"
    stage = code2wav(only("speaker_graph"))
    with pytest.raises(RuntimeSetupError, match="ASCEND_LAUNCH_BLOCKING"):
        stage.load_weights(())
    assert stage.backend is None


@pytest.mark.parametrize("block", [None, only("sync_free_prompt", "speaker_stream")])
def test_a_stage_without_graph_items_starts_whatever_a_capture_would_need(
    npu: SimpleNamespace, code2wav: BuildStage, block: Any
) -> None:
    npu.problem = "ASCEND_LAUNCH_BLOCKING=1"
    stages.check_runtime(session(code2wav(block)))
    assert npu.checks == 0


@pytest.fixture
def npu_stage(npu: SimpleNamespace, code2wav: BuildStage) -> Any:
    """The stage as an NPU builds it: on later hosts with their own torch CAM++ in place."""
    return loaded(code2wav(only("speaker_device", "speaker_graph", "speaker_stream")))


def test_the_start_up_line_says_which_speaker_model_serves(npu_stage: Any) -> None:
    core = npu_stage.backend._token2wav._core
    if HAS_TORCH_CAMPPLUS:
        assert type(core.spk_model).__name__ == "CampplusTorch"
        assert not session(npu_stage).on("speaker_device")
        assert "not applied: speaker_device (the host's own CampplusTorch serves)" in session(npu_stage).describe()
    else:
        assert type(core.spk_model).__name__ == "Campplus"
        assert session(npu_stage).on("speaker_device")
    assert session(npu_stage).on("speaker_graph")
    assert session(npu_stage).on("speaker_stream")


@pytest.mark.skipif(not HAS_TORCH_CAMPPLUS, reason="this host has no CampplusTorch")
def test_graph_and_stream_over_the_hosts_own_model_equal_it(npu_stage: Any, device: Any) -> None:  # noqa: F811
    core = npu_stage.backend._token2wav._core
    host_model = core.spk_model
    feature = torch.randn(60, 80, generator=torch.Generator().manual_seed(1))
    expected = host_model(feature)

    simulated = copy.copy(host_model)
    simulated.model, simulated.device = copy.deepcopy(host_model.model), DEVICE
    to_simulated(simulated.model)
    core._spk_model, core.device = simulated, DEVICE
    for _ in range(3):
        torch.testing.assert_close(read(core._forward_spk_embedding(feature)), expected, rtol=1e-4, atol=1e-4)
    counts = session(npu_stage).snapshot()
    assert {name: counts["speaker_graph"][name] for name in ("captures", "replays")} == {"captures": 1, "replays": 2}
    assert counts["speaker_stream"] == {"calls": 3}


@pytest.mark.parametrize("switch", [{"use_trt": False}, {"use_trt": True}, {}])
def test_the_facade_takes_the_parameters_of_the_core(npu_stage: Any, switch: dict[str, Any]) -> None:
    if not HAS_TORCH_CAMPPLUS:
        pytest.skip("this host has no device switch")
    facade = npu_stage.backend._token2wav
    facade._core._spk_model = None
    facade.enable_device_spk_embedding(**switch)
    assert type(facade._core._spk_model).__name__ == "CampplusTorch"


def test_tensorrt_that_the_host_puts_in_place_is_what_serves(
    registered: None, code2wav: BuildStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.model_executor.models.cosyvoice3 import speaker_embedding_trt

    class CampplusTRT:
        def __call__(self, feature: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1, 192)

    monkeypatch.setattr(speaker_embedding_trt, "get_campplus_trt", lambda *args, **kwargs: CampplusTRT())
    stage = loaded(code2wav(only("speaker_device")))
    assert session(stage).on("speaker_device")
    stage.backend._token2wav.enable_trt_spk_embedding(cpu_reference=True)
    assert session(stage).not_applied == {"speaker_device": "the host's own CampplusTRT serves"}
