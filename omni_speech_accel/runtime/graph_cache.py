# SPDX-License-Identifier: Apache-2.0
"""A pure device function, captured once per input shape and replayed afterwards.

CAM++ on one reference is 1151 kernel launches, 44 ms of host time for 4 ms of device work: a graph is the launches
paid once. The rules below are each a way in which such a cache has gone wrong; each has a test in the simulated
accelerator's suite and a mutation in `tools/mutations.py`.

Why replays wait for an event: all callers share the graphs' buffers. Replicas call from different streams, and a host
lock only orders the submission: the second replica's copy into a graph's inputs could run while the first replica's
replay, submitted earlier to a slower stream, has yet to read them. So each use ends by recording the last-use event,
after the outputs have been cloned, and begins by making its own stream wait for it.

Why one event for all graphs of a cache, and not one each: graphs that were recorded on one stream share more than they
show. A matrix library has one workspace per stream and bakes its address into every graph recorded there, so two
graphs of different lengths, replayed at once by two replicas, would write their partial sums over each other. For the
same reason nothing ever runs on the capture stream: its workspace is first asked for, and so allocated, in a recording.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from omni_speech_accel.runtime.accelerator import Accelerator, CapturedGraph, Device
from omni_speech_accel.runtime.counters import Counters, PlainCounters

logger = logging.getLogger(__name__)

# Eager runs before a recording. The cache's first makes the function's lazy state and the library's handles, and a
# second shows them settled; a later shape only has plans of its own to make, and its first request pays for each run.
FIRST_WARMUPS = 2
WARMUPS = 1

Signature = tuple[Hashable, ...]


@dataclass(frozen=True)
class _Entry:
    graph: CapturedGraph
    inputs: tuple[torch.Tensor, ...]
    # The graph reads the function's weights by address, so it keeps the function, and with it the weights, alive.
    fn: Callable[..., Any]


class GraphCache:
    """Graphs of one function, by key and input shapes.

    One cache serves one function (one model's weights): the graph of a shape runs what it was captured from, whatever
    `fn` a later call passes. `fn` is pure: it does not write its inputs, does not synchronise and draws no random
    numbers. For inference: outputs carry no gradient.

    Args:
        name: for the log.
        accelerator: the device's backend.
        device: where all inputs live.
        max_graphs: how many shapes may hold a graph, which bounds the memory; the first shapes seen get one, all
            others run eager. 0: no graphs.
        counters: receiver of `captures`, `replays`, `eager` (each call is exactly one of them) and `failures`.

    Raises:
        ValueError: `max_graphs` is negative.
    """

    def __init__(
        self,
        name: str,
        accelerator: Accelerator,
        device: Device,
        max_graphs: int,
        counters: Counters | None = None,
    ) -> None:
        if max_graphs < 0:
            raise ValueError(f"max_graphs must be >= 0, not {max_graphs}")
        self.name = name
        self.counters: Counters = PlainCounters() if counters is None else counters
        self._accelerator = accelerator
        self._device = accelerator.resolve(device)
        self._max_graphs = max_graphs if accelerator.supports_graphs else 0
        # All made here: made at first use, two threads could each make their own lock and both be "alone".
        self._submitting = threading.Lock()
        self._last_use = accelerator.create_event(self._device)
        self._capture_stream = accelerator.create_stream(self._device) if self._max_graphs else None
        # One capture at a time, since captures share the stream. Guards all changes of the tables; reads need no lock.
        self._capturing = threading.Lock()
        self._entries: dict[Signature, _Entry] = {}
        self._failed: set[Signature] = set()

    @property
    def graphs(self) -> int:
        """Shapes that hold a graph now."""
        return len(self._entries)

    @property
    def _full(self) -> bool:
        return len(self._entries) >= self._max_graphs

    @property
    def failed_shapes(self) -> int:
        """Shapes whose capture or first replay failed; they run eager."""
        return len(self._failed)

    def run(self, key: Hashable, fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """`fn(*inputs)` by a graph where there is or can be one, eagerly otherwise.

        Args:
            key: what besides the shapes and dtypes of the inputs selects the graph, normally the frame count.
            fn: tensors in, a pytree of tensors out.
            inputs: tensors on the cache's device.

        Returns:
            What `fn` returns, in memory of the caller's own, valid on the current stream.

        Raises:
            RuntimeSetupError: a capture was due and the device runtime forbids it.
            TypeError: an input is no tensor.
            ValueError: an input is on another device.
        """
        signature = self._signature(key, inputs)
        if self._graphs_allowed():
            entry = self._entries.get(signature)
            if entry is not None:
                started = time.perf_counter()
                outputs = self._replay(entry, inputs)
                self._count("replays", started)
                return outputs
            captured = self._try_capture(signature, fn, inputs)
            if captured is not None:
                return captured.outputs
        # Nothing shared is touched here, so a shape without a graph waits for no other.
        started = time.perf_counter()
        outputs = fn(*inputs)
        self._count("eager", started)
        return outputs

    def close(self) -> None:
        """Free all graphs, once the device has finished with them (the host waits); later calls run eager."""
        with self._capturing:
            self._max_graphs = 0
            with self._submitting:
                self._accelerator.synchronize_event(self._last_use)
            self._entries.clear()

    def _signature(self, key: Hashable, inputs: tuple[torch.Tensor, ...]) -> Signature:
        for value in inputs:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"graph cache {self.name}: inputs are tensors, not {type(value).__name__}")
            if value.device != self._device:
                raise ValueError(f"graph cache {self.name}: input on {value.device}, expected {self._device}")
        return (key, *((tuple(value.shape), value.dtype) for value in inputs))

    def _graphs_allowed(self) -> bool:
        if not self._max_graphs:
            return False
        # Autocast keeps casted weights that it frees when its context ends, and a graph would go on reading them.
        if torch.is_autocast_enabled(self._device.type):
            return False
        # The stream's own recording would swallow our waits and copies, or break on them.
        return not self._accelerator.is_capturing(self._device)

    def _try_capture(
        self, signature: Signature, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
    ) -> _Captured | None:
        """Capture a shape and answer its first request, or None: it has to run eager (this time or for good)."""
        if signature in self._failed or self._full:
            return None
        # Not blocking: while another shape is captured, this request runs eager and the next one of its shape may try.
        if not self._capturing.acquire(blocking=False):
            return None
        try:
            if signature in self._entries or signature in self._failed or self._full:
                return None  # another thread has just dealt with it
            # Outside the try below: a wrong set-up must reach the operator, and is no fault of this shape.
            self._accelerator.prepare_capture(self._device)
            started = time.perf_counter()
            try:
                entry = self._record(fn, inputs)
                outputs = self._replay(entry, inputs)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                # Published last: until here the entry has never been seen to work.
                self._entries[signature] = entry
                self._count("captures", started)
                return _Captured(outputs)
            self._failed.add(signature)
        finally:
            self._capturing.release()
        self.counters.inc("failures")
        logger.warning(
            "graph cache %s: shape %s runs eager from now on, capture failed: %s", self.name, signature, reason
        )
        return None

    def _record(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> _Entry:
        # The buffers outlive this call's mode: copying into an inference tensor is an error outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            statics = tuple(value.detach().clone(memory_format=torch.contiguous_format) for value in inputs)
            graph = self._accelerator.capture(
                lambda: fn(*statics),
                self._device,
                stream=self._capture_stream,
                warmups=WARMUPS if self._entries else FIRST_WARMUPS,
            )
        return _Entry(graph, statics, fn)

    def _replay(self, entry: _Entry, inputs: tuple[torch.Tensor, ...]) -> Any:
        accelerator, last_use = self._accelerator, self._last_use
        with self._submitting, torch.no_grad():
            stream = accelerator.current_stream(self._device)
            accelerator.wait_event(stream, last_use)
            try:
                for static, value in zip(entry.inputs, inputs, strict=True):
                    static.copy_(value)
                    # Were the cache dropped now, its buffers would be handed out while this stream reads them.
                    accelerator.record_stream(static, stream)
                entry.graph.replay()
                return pytree.tree_map_only(torch.Tensor, torch.clone, entry.graph.outputs)
            finally:
                # Also after an error: the buffers have been touched by then.
                accelerator.record_event(last_use, stream)

    def _count(self, event: str, started: float) -> None:
        self.counters.inc(event)
        self.counters.observe(event, time.perf_counter() - started)


@dataclass(frozen=True)
class _Captured:
    """The first result of a shape; a class of its own, since the function may return None."""

    outputs: Any
