# SPDX-License-Identifier: Apache-2.0
"""A simulated accelerator: a device in plain Python on which asynchronous mistakes show, every time.

Code that uses streams, events and graphs wrongly mostly works on real hardware, because the hardware is mostly in
time. Here nothing is in time unless an event says so.

What it models
    streams     A queue each. Nothing runs when it is submitted. Work runs when a host waits for it, in any order that
                the events allow: only what is needed (the laziest device), at random by a seed, or all but a starved
                stream first; with `eagerness` the device also makes progress beside the host.
    events      A position in a stream. A wait gates the later work of one stream; recording again moves the event.
    memory      Blocks of raw bytes, poisoned (all bits set: NaN, -1) until written. The last reference to a tensor
                frees its block at once, and the stream that allocated it gets it back at its next allocation of that
                size, poisoned again in that stream's order. Other streams are respected only if `record_stream` named
                them. Queued work holds addresses, not references.
    pinned      Host memory that a `non_blocking` copy reads when it runs. Freed pinned memory is overwritten at once:
                this is the driver whose allocator forgets about copies under way.
    capture     Operations on the capturing stream are recorded, not run, in a private pool whose blocks hold poison
                until a replay. A host synchronisation, a wait for outside work or a second capture in it is an error.
                The runtime must have been prepared (as an NPU's must).
    host syncs  `.item()`, `bool()`, `.cpu()`, a copy from pageable memory, data-dependent shapes: counted, and an error
                where a test forbids them.
    faults      A capture, its end, a replay or an allocation can be made to fail.

What it does not model
    time, kernels that overlap within one stream, several devices, the legacy default stream's implicit ordering (no
    two streams are ordered here), events inside captures, random number generators, autograd, peer copies, the cost
    of anything, and numerics other than the host's.

A simulated tensor is a `torch.Tensor` on device `simulated:0`; any operator that torch can infer the shape of works.
It takes torch's PrivateUse1 slot: a process can have this or an out-of-tree accelerator such as an NPU, not both.
"""

from tests.simulator.accelerator import SimulatedAccelerator
from tests.simulator.device import (
    CaptureError,
    Schedule,
    SimulatedDevice,
    SimulatedFault,
    SimulatedStream,
    SynchronisedError,
)
from tests.simulator.tensor import DEVICE, DEVICE_TYPE, SimulatedTensor, activate, read, slot_taken_by

__all__ = [
    "DEVICE",
    "DEVICE_TYPE",
    "CaptureError",
    "Schedule",
    "SimulatedAccelerator",
    "SimulatedDevice",
    "SimulatedFault",
    "SimulatedStream",
    "SimulatedTensor",
    "SynchronisedError",
    "activate",
    "read",
    "slot_taken_by",
]
