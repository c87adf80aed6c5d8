# SPDX-License-Identifier: Apache-2.0
"""Encodes the references of a cold group, each as a batch of one, from one graph.

The encoder is about 320 small kernels: 7 to 15 ms of launches per reference on
an H200 host for 2.6 ms of device work, so that eight references would spend
longer in launches than in their grouped CFM solve. Captured, the launches are
paid once per group size, and since the rows are independent the graph runs them
side by side on streams of their own. Every kernel is the one that a lone
reference runs, on the same shapes, so the results are bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from omni_speech_accel.runtime import Accelerator, Counters, GraphCache, accelerator_for

__all__ = ["PromptEncoder"]

BRANCHES = 4
"""Streams that a graph spreads its rows over: one row's kernels fill about a quarter of the device."""

GRAPHED = frozenset({"cuda"})
"""Device types whose encoder is captured. Not NPU: a failed capture there ends the process, and none has been tried."""

Encoding = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Encode = Callable[[torch.Tensor], Encoding]


class PromptEncoder:
    """The graphs of one stage's prompt encoder.

    Args:
        counters: Receiver of the graph cache's counts.
        max_graphs: Graphs kept, one per group size and reference length; 0: always eager.
    """

    def __init__(self, counters: Counters, max_graphs: int) -> None:
        self._counters = counters
        self._max_graphs = max_graphs
        self._cache: GraphCache | None = None

    def encode(self, backend: Any, encode: Encode, rows: Sequence[torch.Tensor]) -> list[Encoding]:
        """Encode ``rows``, ``[1, T]`` tokens each: by ``encode``, or the graph of what it runs.

        Returns:
            Per row what ``encode`` returns, in memory of its own.
        """
        if len(rows) < 2 or not self._max_graphs or rows[0].device.type not in GRAPHED:
            return [encode(row) for row in rows]
        device = rows[0].device
        accelerator = accelerator_for(device)
        if self._cache is None:
            self._cache = GraphCache("prompt encoder", accelerator, device, self._max_graphs, self._counters)
        # The first chunk of a new length may replace the tables: before they become part of a graph, not while.
        backend._ensure_relpos_pe(rows[0], None)
        tables = _position_tables(backend)
        # 0.32 dispatches to graphs of its own in _encode_chunk: record what those record.
        eager = getattr(backend, "_encode_chunk_eager", None)
        body = encode if eager is None else partial(eager, last_chunk=False, cnn_cache=None, att_cache=None)
        outputs: list[Encoding] = self._cache.run(_key(tables), _Branches(accelerator, body, tables), *rows)
        return outputs


def _key(tables: Sequence[torch.Tensor]) -> Hashable:
    """What selects a graph besides the rows' shapes: the tables that it reads in place, and the matmul precision."""
    return (
        tuple(table.data_ptr() for table in tables),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )


def _position_tables(backend: Any) -> tuple[torch.Tensor, ...]:
    """The encoder's position tables: a longer chunk replaces them by longer ones."""
    found = (getattr(module, "pe", None) for module in backend.flow.encoder.modules())
    return tuple(table for table in found if isinstance(table, torch.Tensor))


class _Branches:
    """The encoder over each row, on a few streams side by side; keeps alive the tables that its graph reads."""

    def __init__(self, accelerator: Accelerator, encode: Encode, tables: tuple[torch.Tensor, ...]) -> None:
        self._accelerator = accelerator
        self._encode = encode
        self._tables = tables

    def __call__(self, *rows: torch.Tensor) -> list[Encoding]:
        accelerator, device = self._accelerator, rows[0].device
        main = accelerator.current_stream(device)
        start = accelerator.create_event(device)
        accelerator.record_event(start, main)
        branches = [accelerator.create_stream(device) for _ in range(min(BRANCHES, len(rows)) - 1)]
        for branch in branches:
            accelerator.wait_event(branch, start)
        outputs: list[Encoding] = []
        for index, row in enumerate(rows):
            turn = index % (len(branches) + 1)
            if not turn:
                outputs.append(self._encode(row))
                continue
            with accelerator.use_stream(branches[turn - 1]):
                outputs.append(self._encode(row))
        for branch in branches:
            end = accelerator.create_event(device)
            accelerator.record_event(end, branch)
            accelerator.wait_event(main, end)
        return outputs
