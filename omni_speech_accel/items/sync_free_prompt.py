# SPDX-License-Identifier: Apache-2.0
"""``sync_free_prompt``: prompt features without waiting for the device.

Symptom: with decode work queued, ``_prepare_prompt`` takes as long as the queue
(239 ms instead of 155 with 100 ms queued, stock 0.30.0 on an H200). Three calls
wait: uploads from pageable memory, ``.any()`` over device lengths in the
tokenizer's ``quantize``, and the encoder's ``freqs_cis.to(device)``.

Stock's ``_prepare_prompt`` is called, not restated: a torch function mode turns
its host-to-device copies into pinned, asynchronous ones, so whatever a host
computes there stays as it is. ``quantize`` takes the library's own one-window
branch where the mel's shape shows that it would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from omni_speech_accel import runtime
from omni_speech_accel.items._prompt import ensure_models_loaded, quantize_short, takes_short_path
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.session import Item

__all__ = ["AsyncUploads", "ensure_models_loaded", "prepare_prompt", "quantize"]

KEY = "sync_free_prompt"


class AsyncUploads(TorchFunctionMode):
    """Copies from host tensors to ``device`` are staged through pinned memory and do not block.

    Acts on ``tensor.to(device)`` without a change of dtype and on ``torch.tensor(data, device=device)``; every other
    call runs as it is. Values, dtype, shape and device are those of the plain call.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type

    def _is_ours(self, device: Any) -> bool:
        return isinstance(device, (str, torch.device)) and torch.device(device).type == self._device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            source, *rest = args
            target: Any = rest[0] if rest else kwargs.get("device")
            plain = len(rest) <= 1 and set(kwargs) <= {"device", "non_blocking"}
            if plain and self._is_ours(target) and source.device.type == "cpu" and source.layout is torch.strided:
                return runtime.upload(source, torch.device(target))
        elif func is torch.tensor and self._is_ours(kwargs.get("device")) and not kwargs.get("requires_grad"):
            device = torch.device(kwargs["device"])
            return runtime.upload(func(*args, **{**kwargs, "device": "cpu"}), device)
        return func(*args, **kwargs)


def prepare_prompt(item: Item[ItemOptions], wrapped: Any, core: Any, /, prompt_wav: str) -> Any:
    """Stock's ``_prepare_prompt(prompt_wav)`` with asynchronous uploads. Returns what stock returns."""
    item.counters.inc("calls")
    device = torch.device(core.device)
    if device.type == "cpu":
        return wrapped(prompt_wav)
    with AsyncUploads(device):
        return wrapped(prompt_wav)


def quantize(
    item: Item[ItemOptions], wrapped: Any, tokenizer: Any, /, mel: torch.Tensor, mel_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize(mel, mel_len)``: the one-window branch by shape, stock's own code for longer audio."""
    if not takes_short_path(mel):
        item.counters.inc("long")
        result: tuple[torch.Tensor, torch.Tensor] = wrapped(mel, mel_len)
        return result
    item.counters.inc("short")
    return quantize_short(tokenizer, mel, mel_len)
