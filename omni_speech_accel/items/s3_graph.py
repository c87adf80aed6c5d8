# SPDX-License-Identifier: Apache-2.0
"""``s3_graph``: the S3 tokenizer's quantize as one graph per frame count.

Eager quantize is launch-bound: 7-8 ms per reference on an H200 host, 12.99 ms on
the reference thread's NPU (6.04 there as a replay). MiniCPM-o folds every
reference to one length, so one graph serves nearly all of its traffic; where
lengths vary, the first ``max_graphs`` lengths seen are captured and the rest run
eager. Audio over one window is left to the library. A capture that the driver
refuses leaves that length eager (``runtime.npu`` tells what no process survives).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from omni_speech_accel import runtime
from omni_speech_accel.items._prompt import ensure_models_loaded, quantize_short, takes_short_path
from omni_speech_accel.plugin.options import GraphOptions
from omni_speech_accel.plugin.session import Item

__all__ = ["ensure_models_loaded", "quantize"]

KEY = "s3_graph"


def _graphs(item: Item[GraphOptions], device: torch.device) -> runtime.GraphCache:
    return runtime.GraphCache(
        "S3 quantize", runtime.accelerator_for(device), device, item.options.max_graphs, item.counters
    )


def quantize(
    item: Item[GraphOptions], wrapped: Any, tokenizer: Any, /, mel: torch.Tensor, mel_len: torch.Tensor
) -> Any:
    """``quantize(mel [B, 128, T], mel_len [B])`` replayed from the graph of ``T`` frames where there is one."""
    if not takes_short_path(mel):
        item.counters.inc("long")
        return wrapped(mel, mel_len)
    if mel_len.device != mel.device:
        return wrapped(mel, mel_len)  # the library takes lengths from anywhere, a graph does not
    # By device: a call that the library refuses must not bind the stage's graphs to the wrong one.
    graphs = item.state(partial(_graphs, item, mel.device), str(mel.device))
    return graphs.run(mel.shape[-1], partial(quantize_short, tokenizer), mel, mel_len, owner=tokenizer)
