# SPDX-License-Identifier: Apache-2.0
"""``speaker_graph``: CAM++ as one graph per frame count.

Eager CAM++ is launch-bound: about 1,150 launches and 16 ms on an H200 host (5 as a
replay), 33 ms on the reference thread's NPU (10.69 there as a replay). Lengths are exact: padding changes an embedding.

The weights are shared by every replica in the process; graphs and their static
buffers belong to one stage, so that each stage's ``max_graphs`` and counters are
its own. A capture that the driver refuses leaves that length eager (``runtime.npu``
tells what no process survives).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from omni_speech_accel import runtime
from omni_speech_accel.items._prompt import is_device_speaker_model
from omni_speech_accel.plugin.options import GraphOptions
from omni_speech_accel.plugin.session import Item

KEY = "speaker_graph"


def _graphs(item: Item[GraphOptions], device: torch.device) -> runtime.GraphCache:
    return runtime.GraphCache("CAM++", runtime.accelerator_for(device), device, item.options.max_graphs, item.counters)


def forward_spk_embedding(item: Item[GraphOptions], wrapped: Any, core: Any, /, spk_feat: torch.Tensor) -> Any:
    """``_forward_spk_embedding(spk_feat [T, 80]) -> [1, 192]``, replayed where the model is a torch CAM++."""
    model = core.spk_model
    if not is_device_speaker_model(model) or hasattr(model, "_graphs"):
        # An onnxruntime or TensorRT session, or a host whose CAM++ replays graphs of its own.
        return wrapped(spk_feat)
    features = runtime.upload(spk_feat, core.device)
    graphs = item.state(partial(_graphs, item, features.device))
    return graphs.run(features.shape[0], model, features, owner=model.model)
