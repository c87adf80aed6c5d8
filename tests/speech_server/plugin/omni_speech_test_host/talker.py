# SPDX-License-Identifier: Apache-2.0
"""The tiny talker of the two-stage pipeline."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM


class OmniSpeechTestTalker(LlamaForCausalLM):
    """A Llama that ignores what the host's runner passes to speech talkers beside the tokens (sampling metadata)."""

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
