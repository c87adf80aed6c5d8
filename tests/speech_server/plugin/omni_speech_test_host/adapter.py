# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/audio/speech`` whose ``input`` is a list of codec tokens instead of text.

{"input": "12 34 56 ...", "ref_audio": "data:audio/wav;base64,...", "response_format": "wav"}
"""

from __future__ import annotations

import copy
import uuid
from typing import Any

import torch
from vllm_omni.entrypoints.openai.tts_adapters import TTS_ADAPTER_REGISTRY, register_tts_adapter
from vllm_omni.entrypoints.openai.tts_adapters.base import ARTTSAdapter, PreparedRequest

from omni_speech_test_host.pipelines import CODE2WAV_STAGE, TALKER_STAGE, TOKEN2WAV_STAGE

CODEC_VOCABULARY = 6561  # flow.yaml of both models: vocab_size, 3^8 codes of the S3 quantizer


def parse_codes(text: str) -> list[int]:
    """Codec tokens out of the request's ``input``. Raises ValueError with a message for the client."""
    try:
        codes = [int(word) for word in text.split()]
    except ValueError:
        raise ValueError("input must be codec ids separated by spaces") from None
    if not codes or not all(0 <= code < CODEC_VOCABULARY for code in codes):
        raise ValueError(f"input must be one or more codec ids from 0 to {CODEC_VOCABULARY - 1}")
    return codes


class CodecTokenAdapter(ARTTSAdapter):
    """Turns a request into the payload that the stock speech stage takes from its talker."""

    name = "omni_speech_test_host"
    stage_keys = frozenset({CODE2WAV_STAGE, TOKEN2WAV_STAGE, TALKER_STAGE})

    def validate(self, request: Any) -> str | None:
        try:
            parse_codes(request.input)
        except ValueError as error:
            return str(error)
        return None

    async def build(self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool) -> PreparedRequest:
        codes = parse_codes(request.input)
        prompt: dict[str, Any] = {"prompt_token_ids": codes}
        reference: torch.Tensor | None = None
        rate = 0
        if request.ref_audio is not None:
            samples, rate, _ = await self.ctx.server._resolve_ref_audio_array(request.ref_audio)
            reference = torch.as_tensor(samples, dtype=torch.float32).reshape(-1).clone()
        stage = self.ctx.engine_client.stage_configs[0].stage_pipeline_config.model_stage
        if stage == CODE2WAV_STAGE:
            prompt["additional_information"] = self._whole_utterance(codes, reference, rate)
        elif stage == TALKER_STAGE and reference is not None:
            # The first chunk takes the reference from the talker's request, the host's prewarm from the prompt.
            prompt["additional_information"] = {"codes": {"ref": reference}, "meta": {"ref_audio_sr": rate}}
            prompt["_minicpmo45_reference_audio"] = (reference.numpy(), rate)
        return PreparedRequest(prompt=prompt, tts_params={}, model_type=self.name)

    @staticmethod
    def _whole_utterance(codes: list[int], reference: torch.Tensor | None, rate: int) -> dict[str, dict[str, Any]]:
        """One chunk that is both the first and the last, as the talker's bridge would send it."""
        payload: dict[str, dict[str, Any]] = {
            "codes": {"audio": torch.tensor(codes, dtype=torch.long)},
            "meta": {
                "request_id": f"speech-{uuid.uuid4().hex[:8]}",
                "cache_epoch": 0,
                "chunk_seq": 0,
                "last_chunk": True,
                "code_flat_numel": len(codes),
            },
        }
        if reference is not None:
            payload["codes"]["ref"] = reference
            payload["meta"]["ref_audio_sr"] = rate
        return payload

    def apply_sampling_overrides(
        self,
        sampling_params_list: list[Any],
        request: Any,
        prompt: dict[str, Any] | None = None,
        request_id: str | None = None,
    ) -> list[Any]:
        if len(sampling_params_list) < 2 or prompt is None:
            return sampling_params_list
        # The talker generates one (ignored) token for each codec token, so that they leave at an AR stage's pace.
        params = copy.deepcopy(sampling_params_list)
        params[0].max_tokens = params[0].min_tokens = len(prompt["prompt_token_ids"])
        params[0].ignore_eos = True
        return params


def register_adapter() -> None:
    if CodecTokenAdapter.name not in TTS_ADAPTER_REGISTRY:
        register_tts_adapter(CodecTokenAdapter)
