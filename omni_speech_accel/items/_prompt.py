# SPDX-License-Identifier: Apache-2.0
"""What the prompt-feature items share: the tokenizer's short path and the speaker model's kinds."""

from __future__ import annotations

from typing import Any

import torch

from omni_speech_accel.plugin.session import Item, attach

S3_MAX_FRAMES = 3000
"""Longest mel, in 10 ms frames, that s3tokenizer quantizes in one window.

Source: ``max_frames`` in ``s3tokenizer.model_v2.S3TokenizerV2.quantize``; a test reads it there. Longer audio is cut
into overlapping windows by the library, which is left to it.
"""


def loads_now(item: Item[Any], wrapped: Any, core: Any) -> bool:
    """Call ``_ensure_models_loaded``; true where this very call has loaded the models.

    The tokenizer is then bound to the core's session, so that its ``quantize`` knows whose settings hold.
    """
    loaded = core._models_loaded
    wrapped()
    if loaded or not core._models_loaded:
        return False
    attach(core._audio_tokenizer, item.session)
    return True


def ensure_models_loaded(item: Item[Any], wrapped: Any, core: Any, /) -> None:
    """Move the encoder's rotary table to the device once, at load.

    Its forward moves it at each call otherwise, from pageable memory: that waits for the device, and no capture can
    record it.
    """
    if loads_now(item, wrapped, core):
        encoder = core._audio_tokenizer.encoder
        encoder.freqs_cis = encoder.freqs_cis.to(core.device)


def takes_short_path(mel: torch.Tensor) -> bool:
    """Whether ``mel`` ``[B, 128, T]`` fits one window, told from its shape.

    The library asks ``(mel_len > max_frames).any()`` of device lengths, which drains the device queue; a length is
    never above ``T``, so the shape answers without asking the device.
    """
    return mel.shape[-1] <= S3_MAX_FRAMES


@torch.inference_mode()
def quantize_short(tokenizer: Any, mel: torch.Tensor, mel_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codec tokens ``[B, T']`` and their lengths ``[B]`` of mels that fit one window: encoder, then quantizer."""
    hidden, code_len = tokenizer.encoder(mel, mel_len)
    return tokenizer.quantizer.encode(hidden), code_len


def is_device_speaker_model(model: Any) -> bool:
    """Whether ``model`` is a torch CAM++ (ours or the host's), as opposed to an onnxruntime or TensorRT session."""
    from omni_speech_accel.campplus.model import Campplus

    return isinstance(model, Campplus) or isinstance(getattr(model, "model", None), torch.nn.Module)
