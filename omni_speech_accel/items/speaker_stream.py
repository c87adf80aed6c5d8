# SPDX-License-Identifier: Apache-2.0
"""``speaker_stream``: CAM++ on a private stream.

On the decode stream its kernels queue behind the decode backlog (in the reference
thread, on its NPU: 100 ms -> 43 ms per request once they do not). The caller's
stream joins by an event, on the device; the host never waits. Outputs are kept
for the stream that consumes them, since the core caches them for long.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from omni_speech_accel import runtime
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.session import Item

KEY = "speaker_stream"


def _stream(device: torch.device) -> runtime.PrivateStream:
    return runtime.PrivateStream(runtime.accelerator_for(device), device)


def forward_spk_embedding(item: Item[ItemOptions], wrapped: Any, core: Any, /, spk_feat: torch.Tensor) -> Any:
    """``_forward_spk_embedding(spk_feat [T, 80]) -> [1, 192]`` on the stage's private stream."""
    item.counters.inc("calls")
    stream = item.state(partial(_stream, torch.device(core.device)))
    if spk_feat.device.type == "cpu":
        # Uploaded inside, on the private stream: a host feature has no order with the caller's stream, and an
        # onnxruntime session wants it on the host.
        return stream.run(partial(wrapped, spk_feat))
    return stream.run(wrapped, spk_feat)
