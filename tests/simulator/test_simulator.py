# SPDX-License-Identifier: Apache-2.0
"""The simulated accelerator bites where real ones do: each mistake here is one that a test may rely on showing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulator import (
    DEVICE,
    CaptureError,
    Schedule,
    SimulatedAccelerator,
    SimulatedDevice,
    SynchronisedError,
    activate,
    read,
    slot_taken_by,
)

pytestmark = pytest.mark.skipif(slot_taken_by() is not None, reason="torch's slot for an out-of-tree device is taken")


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with activate(SimulatedDevice()) as simulated:
        yield simulated


@pytest.fixture
def accelerator(device: SimulatedDevice) -> SimulatedAccelerator:
    return SimulatedAccelerator(device)


def test_nothing_runs_before_somebody_waits(device: SimulatedDevice) -> None:
    value = torch.ones(3, device=DEVICE) + 1
    assert device.default_stream.executed == 0
    assert torch.equal(read(value), torch.full((3,), 2.0))


def test_unwritten_memory_is_poison(device: SimulatedDevice) -> None:
    assert read(torch.empty(3, device=DEVICE)).isnan().all()
    assert (read(torch.empty(3, dtype=torch.int64, device=DEVICE)) == -1).all()


def test_other_stream_without_an_event_reads_poison(device: SimulatedDevice, accelerator: SimulatedAccelerator) -> None:
    value = torch.ones(3, device=DEVICE)
    side = device.create_stream()
    with device.use_stream(side):
        early = read(value + 1)
        event = accelerator.create_event(DEVICE)
        accelerator.record_event(event, device.default_stream)
        accelerator.wait_event(side, event)
        late = read(value + 1)
    assert early.isnan().all()
    assert torch.equal(late, torch.full((3,), 2.0))


def test_freed_block_is_handed_to_its_stream_under_a_reader_that_was_not_recorded(
    device: SimulatedDevice, accelerator: SimulatedAccelerator
) -> None:
    side = device.create_stream()
    for recorded in (False, True):
        value = torch.ones(3, device=DEVICE)
        device.drain()
        with device.use_stream(side):
            consumed = value + 1
        if recorded:
            accelerator.record_stream(value, side)
        del value
        newcomer = torch.full((3,), 7.0, device=DEVICE)
        device.wait_for(device.default_stream)
        with device.use_stream(side):
            assert torch.equal(read(consumed), torch.full((3,), 2.0)) is recorded
        del newcomer


def test_capture_records_and_runs_nothing(device: SimulatedDevice, accelerator: SimulatedAccelerator) -> None:
    value = torch.ones(3, device=DEVICE)
    accelerator.prepare_capture(DEVICE)
    graph = accelerator.capture(lambda: value * 2, DEVICE, warmups=0)
    assert read(graph.outputs).isnan().all()
    graph.replay()
    assert torch.equal(read(graph.outputs), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "look", [lambda value: value.sum().item(), lambda value: bool((value > 0).any()), torch.Tensor.cpu]
)
def test_looking_at_a_value_is_a_host_sync_and_no_part_of_a_capture(
    device: SimulatedDevice, accelerator: SimulatedAccelerator, look: object
) -> None:
    assert callable(look)
    value = torch.ones(3, device=DEVICE)
    look(value)
    assert len(device.host_syncs) == 1
    with device.forbid_host_syncs(), pytest.raises(SynchronisedError):
        look(value)
    accelerator.prepare_capture(DEVICE)
    with pytest.raises(CaptureError):
        accelerator.capture(lambda: look(value), DEVICE, warmups=0)


def test_copy_from_pageable_memory_makes_the_host_wait_and_from_pinned_does_not(
    device: SimulatedDevice, accelerator: SimulatedAccelerator
) -> None:
    target = torch.empty(3, device=DEVICE)
    pinned = accelerator.pin_memory(torch.ones(3))
    target.copy_(pinned, non_blocking=True)
    assert not device.host_syncs
    pinned.fill_(5)  # rewritten before the copy has run
    assert torch.equal(read(target), torch.full((3,), 5.0))
    target.copy_(torch.ones(3), non_blocking=True)
    assert device.host_syncs == ["copy from pageable memory"]


def test_seeds_give_different_orders_and_the_same_seed_the_same(device: SimulatedDevice) -> None:
    def order(seed: int) -> list[str]:
        device.schedule = Schedule(seed)
        ran: list[str] = []
        for name in "ab":
            stream = device.create_stream(name)
            for _ in range(4):
                device.submit(name, lambda name=name: ran.append(name), stream)  # type: ignore[misc]
        device.drain()
        return ran

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 4


def test_starved_stream_runs_last(device: SimulatedDevice) -> None:
    ran: list[str] = []
    first, second = device.create_stream("first"), device.create_stream("second")
    device.submit("first", lambda: ran.append("first"), first)
    device.submit("second", lambda: ran.append("second"), second)
    device.schedule = Schedule(starved=[first])
    device.drain()
    assert ran == ["second", "first"]


def test_host_and_device_tensors_do_not_mix(device: SimulatedDevice) -> None:
    with pytest.raises(RuntimeError, match="found one on the host"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


def test_modules_run_on_it_with_the_hosts_numbers(device: SimulatedDevice) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(4, 8, 3, padding=1),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 2),
    ).eval()
    mel = torch.randn(2, 4, 6)
    with torch.no_grad():
        wanted = model(mel)
        result = read(model.to(DEVICE)(mel.to(DEVICE)))
    torch.testing.assert_close(result, wanted)
