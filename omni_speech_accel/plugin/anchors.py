# SPDX-License-Identifier: Apache-2.0
"""Where a session is opened and handed on: the constructors of the stage models and of what they build.

Anchors change nothing that stock does. They read the settings when the config
is at hand and hang the session on the objects that the items wrap.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_speech_accel.plugin.table import BATCHED_MODULE, CODE2WAV_MODULE, CORE_MODULE, TALKER_MODULE, Symbol

__all__ = ["ANCHORS", "Anchor"]

CONFIG_MODULE = "vllm_omni.config.omni_config"
_TALKER = "MiniCPMO45OmniTTSForConditionalGeneration"


@dataclass(frozen=True)
class Anchor:
    """A wrapper called as ``wrapper(wrapped, instance, args, kwargs)`` of the module ``implementation``."""

    symbol: Symbol
    wrapper: str
    implementation: str = "omni_speech_accel.anchors.stages"


ANCHORS: tuple[Anchor, ...] = (
    Anchor(Symbol(CODE2WAV_MODULE, "MiniCPMO45Code2Wav.__init__"), "stage_model_init"),
    Anchor(Symbol(CODE2WAV_MODULE, "MiniCPMO45Code2Wav._build_backend"), "build_backend"),
    Anchor(Symbol(BATCHED_MODULE, "BatchedToken2Wav.__init__"), "backend_init"),
    Anchor(Symbol(CORE_MODULE, "StepAudio2Token2WavCore.__init__"), "core_init"),
    Anchor(Symbol(CORE_MODULE, "StepAudio2Token2WavForConditionalGeneration.__init__"), "announced_model_init"),
    Anchor(Symbol(TALKER_MODULE, f"{_TALKER}.__init__"), "announced_model_init"),
    Anchor(Symbol(TALKER_MODULE, f"{_TALKER}._sample_audio_code"), "with_session"),
    Anchor(Symbol(TALKER_MODULE, f"{_TALKER}._sample_audio_code_greedy"), "with_session"),
    Anchor(
        Symbol(CONFIG_MODULE, "VllmOmniConfig.from_pipeline_config"),
        "from_pipeline_config",
        "omni_speech_accel.anchors.deploy",
    ),
)
