# SPDX-License-Identifier: Apache-2.0
"""Work beside the caller's stream, joined to it by an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

from omni_speech_accel.runtime.accelerator import Accelerator, Device
from omni_speech_accel.runtime.staging import PinnedStager

Outputs = TypeVar("Outputs")


class PrivateStream:
    """A stream of one owner, for work that need not queue behind what the caller's stream is busy with.

    The stream starts behind all that its creator has queued so far, so that weights whose upload is still queued are
    seen complete: make it after the model is loaded.

    Args:
        accelerator: the device's backend.
        device: where the work runs.
        stager: uploads host inputs; one of its own by default.
    """

    def __init__(self, accelerator: Accelerator, device: Device, stager: PinnedStager | None = None) -> None:
        self._accelerator = accelerator
        self._device = accelerator.resolve(device)
        self._stager = PinnedStager(accelerator) if stager is None else stager
        if accelerator.supports_streams:
            self._stream = accelerator.create_stream(self._device)
            loaded = accelerator.create_event(self._device)
            accelerator.record_event(loaded, accelerator.current_stream(self._device))
            accelerator.wait_event(self._stream, loaded)

    def run(self, fn: Callable[..., Outputs], *inputs: torch.Tensor) -> Outputs:
        """`fn(*inputs on the device)`, run beside the caller's stream.

        Host inputs are uploaded on the private stream and wait for nothing. Inputs that are on the device already are
        the caller's work: the private stream waits for it by an event. The caller's stream waits for the result by an
        event; the host never waits. `fn` returns a pytree; its tensors may be used on the caller's stream at once.

        Without streams, and while the caller's stream is recording a graph, `fn` runs on the caller's stream: a
        recording must not depend on work outside it.
        """
        accelerator, device = self._accelerator, self._device
        if not accelerator.supports_streams or accelerator.is_capturing(device):
            return fn(*(value.to(device) for value in inputs))
        caller = accelerator.current_stream(device)
        made_by_caller = [value for value in inputs if value.device == device]
        if made_by_caller:
            ready = accelerator.create_event(device)
            accelerator.record_event(ready, caller)
            accelerator.wait_event(self._stream, ready)
            for value in made_by_caller:
                # The caller may free it while the private stream has yet to read it.
                accelerator.record_stream(value, self._stream)
        with accelerator.use_stream(self._stream):
            outputs = fn(*(self._stager.upload(value, device) for value in inputs))
            done = accelerator.create_event(device)
            accelerator.record_event(done, self._stream)
        accelerator.wait_event(caller, done)
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.device == device:
                # Its block belongs to the private stream, which would write it anew while the caller still reads it.
                accelerator.record_stream(leaf, caller)
        return outputs
