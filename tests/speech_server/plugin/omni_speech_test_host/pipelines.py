# SPDX-License-Identifier: Apache-2.0
"""The pipelines that a deploy YAML can name, and the talker architecture of the two-stage one."""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm_omni.config.pipeline_registry import register_pipeline
from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig
from vllm_omni.model_executor.models.registry import OmniModelRegistry

TALKER = "OmniSpeechTestTalker"

#: ``model_stage`` of each first stage; the speech adapter is found by these.
CODE2WAV_STAGE = "speech_test_code2wav"
TOKEN2WAV_STAGE = "speech_test_token2wav"
TALKER_STAGE = "speech_test_talker"

_STOCK_BRIDGE = "vllm_omni.model_executor.stage_input_processors.minicpmo_4_5_omni"


def _audio_stage(stage_id: int, model_stage: str, architecture: str, **options: Any) -> StagePipelineConfig:
    """A stage that takes codec tokens and ends in audio."""
    return StagePipelineConfig(
        stage_id=stage_id,
        model_stage=model_stage,
        model_arch=architecture,
        execution_type=StageExecutionType.LLM_GENERATION,
        engine_output_type="audio",
        final_output=True,
        final_output_type="audio",
        sampling_constraints={"detokenize": False},
        **options,
    )


def _single_stage(name: str, model_stage: str, architecture: str) -> PipelineConfig:
    stage = _audio_stage(0, model_stage, architecture, owns_tokenizer=True)
    return PipelineConfig(model_type=name, model_arch=architecture, stages=(stage,))


def _two_stage() -> PipelineConfig:
    options: dict[str, Any] = {
        "sync_process_input_func": f"{_STOCK_BRIDGE}.tts2code2wav_token_only",
        "requires_full_payload_input": True,
    }
    # 0.32 prepares the reference of a request while its talker still runs; 0.30 has no such hook.
    if "async_chunk_prewarm_payload_func" in StagePipelineConfig.__dataclass_fields__:
        options["async_chunk_prewarm_payload_func"] = f"{_STOCK_BRIDGE}.code2wav_prewarm_payload"
    talker = StagePipelineConfig(
        stage_id=0,
        model_stage=TALKER_STAGE,
        model_arch=TALKER,
        execution_type=StageExecutionType.LLM_AR,
        owns_tokenizer=True,
        engine_output_type="latent",
        async_chunk_process_next_stage_input_func="omni_speech_test_host.bridge.echo_to_code2wav",
        sampling_constraints={"detokenize": False},
    )
    code2wav = _audio_stage(1, "code2wav", "MiniCPMO45Code2Wav", input_sources=(0,), **options)
    return PipelineConfig(model_type="speech_test_two_stage", model_arch=TALKER, stages=(talker, code2wav))


def register_pipelines() -> None:
    """Register the talker and the three pipelines with the host."""
    # Stages look an architecture up in the host's registry, the inspection subprocess in vLLM's.
    for registry in (ModelRegistry, OmniModelRegistry):
        registry.register_model(TALKER, "omni_speech_test_host.talker:OmniSpeechTestTalker")
    register_pipeline(_single_stage("speech_test_minicpmo", CODE2WAV_STAGE, "MiniCPMO45Code2Wav"))
    register_pipeline(
        _single_stage("speech_test_step_audio2", TOKEN2WAV_STAGE, "StepAudio2Token2WavForConditionalGeneration")
    )
    register_pipeline(_two_stage())
