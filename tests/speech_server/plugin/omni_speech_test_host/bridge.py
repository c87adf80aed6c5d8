# SPDX-License-Identifier: Apache-2.0
"""From the talker to Code2Wav: the prompt's codec tokens, one for each token the talker has generated.

They go through the stock MiniCPM-o bridge, so windows, left context and the reference on the first chunk are the
host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm_omni.engine.serialization import deserialize_additional_information
from vllm_omni.model_executor.stage_input_processors.minicpmo_4_5_omni import tts2code2wav_async_chunk

_SENT = "_omni_speech_test_host_sent"


class _DecodedRequest:
    """The scheduler's request with ``additional_information`` as the mapping that the stock bridge reads."""

    def __init__(self, request: Any) -> None:
        self._request = request
        info = getattr(request, "additional_information", None)
        self.additional_information = info if isinstance(info, Mapping) else deserialize_additional_information(info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _tokens(ids: Any) -> list[int]:
    """A plain list out of vLLM's read-only view of token ids."""
    return list(getattr(ids, "_x", ids) or [])


def echo_to_code2wav(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False) -> Any:
    """``async_chunk_process_next_stage_input_func`` of the talker stage."""
    prompt = _tokens(request.prompt_token_ids)
    generated = min(len(_tokens(request.all_token_ids)) - len(prompt), len(prompt))
    sent: dict[str, int] = transfer_manager.__dict__.setdefault(_SENT, {})
    start = sent.get(request.request_id, 0)
    sent[request.request_id] = generated
    if is_finished:
        del sent[request.request_id]
    request_id = getattr(request, "external_req_id", None) or request.request_id
    delta = {
        "codes": {"audio": torch.tensor(prompt[start:generated], dtype=torch.long)},
        "meta": {"request_id": str(request_id)},
    }
    return tts2code2wav_async_chunk(transfer_manager, delta, _DecodedRequest(request), is_finished)
