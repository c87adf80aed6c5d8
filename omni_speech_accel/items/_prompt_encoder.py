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

BRANCHES = 4
"""Streams that a graph spreads its rows over: one row's kernels fill a small part of the device."""

GRAPHED = frozenset({"cuda"})
"""Device types whose encoder is captured. Not NPU, where none has been tried: an operator that cannot be recorded ends
the process there (``runtime.npu``), and the encoder's are not known to be recordable, as CAM++'s and S3's are."""

Encoding = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Encode = Callable[[torch.Tensor], Encoding]


class PromptEncoder:
    """The graphs of one stage's prompt encoder.

    Args:
        device: Where the encoder is.
        counters: Receiver of the graph cache's counts.
        max_graphs: Graphs kept, one per group size and reference length; 0: always eager. The first group of a length
            runs eagerly.
    """

    def __init__(self, device: torch.device, counters: Counters, max_graphs: int) -> None:
        self._graphs: GraphCache | None = None
        self._streams: list[Any] = []
        self._settled: set[int] = set()
        if device.type not in GRAPHED or not max_graphs:
            return
        self._accelerator = accelerator_for(device)
        self._graphs = GraphCache("prompt encoder", self._accelerator, device, max_graphs, counters)
        # Shared by all graphs: a library's workspace comes with each stream that it has been used on.
        self._streams = [self._accelerator.create_stream(device) for _ in range(BRANCHES - 1)]

    def encode(self, backend: Any, encode: Encode, rows: Sequence[torch.Tensor]) -> list[Encoding]:
        """Encode ``rows``, ``[1, T]`` tokens each: by ``encode``, or the graph of what it runs.

        Returns:
            Per row what ``encode`` returns, in memory of its own.
        """
        lengths = {int(row.shape[1]) for row in rows}
        if self._graphs is None or len(rows) < 2 or not lengths <= self._settled:
            # A length that is new may make the encoder replace its tables: they must stand before a graph reads them.
            self._settled |= lengths
            return [encode(row) for row in rows]
        tables = _position_tables(backend)
        # 0.32 dispatches to graphs of its own in _encode_chunk: record what those record.
        eager = getattr(backend, "_encode_chunk_eager", None)
        body = encode if eager is None else partial(eager, last_chunk=False, cnn_cache=None, att_cache=None)
        outputs: list[Encoding] = self._graphs.run(
            _key(tables), _SideBySide(self._accelerator, self._streams, body, tables), *rows
        )
        return outputs


def _key(tables: Sequence[torch.Tensor]) -> Hashable:
    """What selects a graph besides the rows' shapes: the tables that it reads in place."""
    return tuple(id(table) for table in tables)  # the graph keeps them, so no other object gets their identity


def _position_tables(backend: Any) -> tuple[torch.Tensor, ...]:
    found = (getattr(module, "pe", None) for module in backend.flow.encoder.modules())
    return tuple(table for table in found if isinstance(table, torch.Tensor))


class _SideBySide:
    """The encoder over each row. A graph keeps this object, and with it the tables that the graph reads."""

    def __init__(
        self, accelerator: Accelerator, streams: Sequence[Any], encode: Encode, tables: tuple[torch.Tensor, ...]
    ) -> None:
        self._accelerator = accelerator
        self._streams = streams
        self._encode = encode
        self._tables = tables

    def __call__(self, *rows: torch.Tensor) -> list[Encoding]:
        accelerator, device = self._accelerator, rows[0].device
        streams = self._streams[: len(rows) - 1]
        if not streams or not accelerator.is_capturing(device):
            # Run eagerly, launches are what takes the time, and memory would have to be handed between the streams.
            return [self._encode(row) for row in rows]
        main = accelerator.current_stream(device)
        start = accelerator.create_event(device)
        accelerator.record_event(start, main)
        for stream in streams:
            accelerator.wait_event(stream, start)
        outputs: list[Encoding] = []
        for index, row in enumerate(rows):
            turn = index % (len(streams) + 1)
            with accelerator.use_stream(main if turn == 0 else streams[turn - 1]):
                outputs.append(self._encode(row))
        for stream in streams:
            end = accelerator.create_event(device)
            accelerator.record_event(end, stream)
            accelerator.wait_event(main, end)
        return outputs
