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
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from omni_speech_accel.runtime.accelerator import Accelerator, CapturedGraph, Device, Event
from omni_speech_accel.runtime.counters import Counters, PlainCounters

logger = logging.getLogger(__name__)

# Eager runs before a recording. The cache's first makes the function's lazy state and the library's handles, and a
# second shows them settled; a later shape only has plans of its own to make, and its first request pays for each run.
FIRST_WARMUPS = 2
WARMUPS = 1

# Captures that fail one after the other, whatever their shapes, fail for a reason of the device's: out of streams, of
# memory. Each costs its request the warm-ups and, on Ascend, seconds in the driver.
FAILURES_IN_A_ROW = 3

Signature = tuple[Any, ...]  # key, (owner's id, precision switches), shape and dtype of each input


@dataclass(frozen=True)
class _Entry:
    graph: CapturedGraph
    inputs: tuple[torch.Tensor, ...]
    # The graph reads weights by address. Without an owner it keeps the function, and with it the weights, alive; with
    # one it serves that very object (an id may come back) and is dropped after it.
    fn: Callable[..., Any] | None
    owner: weakref.ref[Any] | None

    def serves(self, owner: object | None) -> bool:
        return owner is (None if self.owner is None else self.owner())


def _orphan(
    accelerator: Accelerator, device: torch.device, last_use: Event, orphaned: deque[int], identity: int, _: Any
) -> None:
    """An owner dies, and its weights after this returns: replays that still read them must have run.

    Called by the garbage collector, in any thread and under any lock, so it takes none.
    """
    orphaned.append(identity)
    if not accelerator.is_capturing(device):
        accelerator.synchronize_event(last_use)


class GraphCache:
    """Graphs of one function, by key, owner of the weights, precision switches and input shapes.

    The graph of a shape runs what it was captured from, whatever `fn` a later call passes. `fn` is pure: it does not
    write its inputs, does not synchronise and draws no random numbers. For inference: outputs carry no gradient.

    Args:
        name: for the log.
        accelerator: the device's backend.
        device: where all inputs live.
        max_graphs: how many shapes may hold a graph, which bounds the memory; the first shapes seen get one, all
            others run eager. 0: no graphs.
        counters: receiver of `captures`, `replays`, `eager` (each call is exactly one of them), of `failures`, and
            beside each `eager` of its reason: `eager_autocast`, `eager_outer_capture`, `eager_cap`, `eager_failed` or
            `eager_busy` (another shape was being captured).

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
        self._failures_in_a_row = 0
        self._reasons: set[str] = set()
        # Of every owner that a capture was tried for. By identity, which is free for another object once it is gone.
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._orphaned: deque[int] = deque()

    @property
    def graphs(self) -> int:
        """Shapes that hold a graph now."""
        return len(self._entries)

    @property
    def failed_shapes(self) -> int:
        """Shapes whose capture or first replay failed; they run eager."""
        return len(self._failed)

    def run(self, key: Hashable, fn: Callable[..., Any], *inputs: torch.Tensor, owner: object | None = None) -> Any:
        """`fn(*inputs)` by a graph where there is or can be one, eagerly otherwise.

        Args:
            key: what besides the shapes and dtypes of the inputs selects the graph, normally the frame count.
            fn: tensors in, a pytree of tensors out.
            inputs: tensors on the cache's device.
            owner: the object whose weights `fn` reads. Its graphs serve it alone and go with it, so that a model that
                takes its place is never answered with the old weights. None: the weights of the first `fn` stay.

        Returns:
            What `fn` returns, in memory of the caller's own, valid on the current stream.

        Raises:
            RuntimeSetupError: a capture was due and the device runtime forbids it.
            TypeError: an input is no tensor.
            ValueError: an input is on another device.
        """
        signature = self._signature(key, inputs, owner)
        why_eager = self._graphs_refused()
        if not why_eager:
            entry = self._entries.get(signature)
            if entry is not None and entry.serves(owner):
                started = time.perf_counter()
                outputs = self._replay(entry, inputs)
                self._count("replays", started)
                return outputs
            captured = self._try_capture(signature, fn, inputs, owner)
            if isinstance(captured, _Captured):
                return captured.outputs
            why_eager = captured
        # Nothing shared is touched here, so a shape without a graph waits for no other.
        started = time.perf_counter()
        outputs = fn(*inputs)
        self._count("eager", started)
        self.counters.inc(f"eager_{why_eager}")
        return outputs

    def close(self) -> None:
        """Free all graphs, once the device has finished with them (the host waits); later calls run eager."""
        with self._capturing:
            self._max_graphs = 0
            with self._submitting:
                self._accelerator.synchronize_event(self._last_use)
            self._entries.clear()

    def _signature(self, key: Hashable, inputs: tuple[torch.Tensor, ...], owner: object | None) -> Signature:
        for value in inputs:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"graph cache {self.name}: inputs are tensors, not {type(value).__name__}")
            if value.device != self._device:
                raise ValueError(f"graph cache {self.name}: input on {value.device}, expected {self._device}")
        # The kernels that a graph recorded are those of the switches then: a stage decodes with TF32, others without.
        baked = (None if owner is None else id(owner), self._accelerator.precision())
        return (key, baked, *((tuple(value.shape), value.dtype) for value in inputs))

    def _graphs_refused(self) -> str:
        """Why this call can have no graph, whatever its shape; empty: it can."""
        if not self._max_graphs:
            return "cap"
        # Autocast keeps casted weights that it frees when its context ends, and a graph would go on reading them.
        if torch.is_autocast_enabled(self._device.type):
            return "autocast"
        # The stream's own recording would swallow our waits and copies, or break on them.
        return "outer_capture" if self._accelerator.is_capturing(self._device) else ""

    def _shape_refused(self, signature: Signature) -> str:
        if signature in self._failed or self._failures_in_a_row >= FAILURES_IN_A_ROW:
            return "failed"
        return "cap" if len(self._entries) >= self._max_graphs else ""

    def _try_capture(
        self, signature: Signature, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], owner: object | None
    ) -> _Captured | str:
        """Capture a shape and answer its first request, or say why it has to run eager (this time or for good)."""
        refused = self._shape_refused(signature)
        if refused and not self._orphaned:
            return refused
        # Not blocking: while another shape is captured, this request runs eager and the next one of its shape may try.
        if not self._capturing.acquire(blocking=False):
            return "busy"
        try:
            self._drop_orphans()
            if refused := self._shape_refused(signature):
                return refused
            if signature in self._entries:
                return "busy"  # another thread has just captured it
            # Outside the try below: a wrong set-up must reach the operator, and is no fault of this shape.
            self._accelerator.prepare_capture(self._device)
            alive = None if owner is None else self._watched(owner)
            started = time.perf_counter()
            try:
                entry = self._record(fn, inputs, alive)
                outputs = self._replay(entry, inputs)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                # Published last: until here the entry has never been seen to work.
                self._entries[signature] = entry
                self._failures_in_a_row = 0
                self._count("captures", started)
                return _Captured(outputs)
            self._failed.add(signature)
            self._failures_in_a_row += 1
        finally:
            self._capturing.release()
        self.counters.inc("failures")
        self._tell(signature, reason)
        return "failed"

    def _tell(self, signature: Signature, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            key, _, *shapes = signature
            logger.warning(
                "graph cache %s: %s of shapes %s runs eager from now on, capture failed: %s",
                self.name,
                key,
                shapes,
                reason,
            )
        if self._failures_in_a_row == FAILURES_IN_A_ROW:
            logger.warning(
                "graph cache %s: %d captures in a row have failed; shapes without a graph run eager from now on",
                self.name,
                FAILURES_IN_A_ROW,
            )

    def _watched(self, owner: object) -> weakref.ref[Any]:
        if id(owner) not in self._owners:
            gone = partial(_orphan, self._accelerator, self._device, self._last_use, self._orphaned, id(owner))
            self._owners[id(owner)] = weakref.ref(owner, gone)
        return self._owners[id(owner)]

    def _drop_orphans(self) -> None:
        """Let go of the graphs and failures whose owner is gone. Under the capture lock."""
        while self._orphaned:
            identity = self._orphaned.popleft()
            del self._owners[identity]
            self._failed = {signature for signature in self._failed if signature[1][0] != identity}
            for signature in [known for known in self._entries if known[1][0] == identity]:
                del self._entries[signature]

    def _record(
        self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], owner: weakref.ref[Any] | None
    ) -> _Entry:
        # The buffers outlive this call's mode: copying into an inference tensor is an error outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            statics = tuple(value.detach().clone(memory_format=torch.contiguous_format) for value in inputs)
            graph = self._accelerator.capture(
                lambda: fn(*statics),
                self._device,
                stream=self._capture_stream,
                warmups=WARMUPS if self._entries else FIRST_WARMUPS,
            )
        return _Entry(graph, statics, fn if owner is None else None, owner)

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
