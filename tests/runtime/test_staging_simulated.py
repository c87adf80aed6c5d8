# SPDX-License-Identifier: Apache-2.0
"""Pinned staging on the simulated accelerator, whose pinned allocator forgets about copies under way."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from omni_speech_accel import runtime
from omni_speech_accel.runtime import Accelerator, PinnedStager
from tests.simulator import DEVICE, Schedule, SimulatedDevice, SimulatedTensor, read


@pytest.fixture
def stager(accelerator: Accelerator) -> PinnedStager:
    return PinnedStager(accelerator, blocking=False)


def test_upload_does_not_make_the_host_wait(device: SimulatedDevice, stager: PinnedStager) -> None:
    backlog = torch.zeros(3, device=DEVICE) + 1
    pending = device.default_stream.pending
    with device.forbid_host_syncs():
        uploaded = stager.upload(torch.arange(5.0), DEVICE)
    assert device.default_stream.pending > pending, "queued behind the backlog"
    torch.testing.assert_close(read(uploaded), torch.arange(5.0))
    del backlog


def test_pinned_source_is_owned_until_its_copy_is_done(device: SimulatedDevice, stager: PinnedStager) -> None:
    uploaded = [stager.upload(torch.full((4,), float(index)), DEVICE) for index in range(8)]
    gc.collect()
    assert stager.in_flight == 8
    assert stager.reclaim() == 0
    for index, tensor in enumerate(uploaded):
        torch.testing.assert_close(read(tensor), torch.full((4,), float(index)))


def test_simulated_driver_forgets_a_pinned_source_that_nobody_owns(
    device: SimulatedDevice, accelerator: Accelerator
) -> None:
    target = torch.zeros(4, device=DEVICE)
    pinned = accelerator.pin_memory(torch.ones(4))
    target.copy_(pinned, non_blocking=True)
    del pinned
    assert read(target).isnan().all()


def test_caller_may_rewrite_its_tensor_as_soon_as_the_upload_returns(
    device: SimulatedDevice, stager: PinnedStager
) -> None:
    mine = torch.ones(4)
    uploaded = stager.upload(mine, DEVICE)
    mine.fill_(9)
    torch.testing.assert_close(read(uploaded), torch.ones(4))


def test_sources_of_finished_copies_are_let_go_at_the_next_upload(
    device: SimulatedDevice, stager: PinnedStager
) -> None:
    for _ in range(5):
        stager.upload(torch.ones(4), DEVICE)
        device.drain()
    assert stager.in_flight == 1
    assert stager.reclaim() == 1
    assert stager.in_flight == 0


def test_copy_that_finishes_out_of_order_is_let_go_and_the_others_are_kept(
    device: SimulatedDevice, stager: PinnedStager
) -> None:
    slow, fast = device.create_stream("slow"), device.create_stream("fast")
    with device.use_stream(slow):
        late = stager.upload(torch.ones(4), DEVICE)
    with device.use_stream(fast):
        early = stager.upload(torch.zeros(4), DEVICE)
    device.wait_for(fast)
    assert stager.reclaim() == 1
    assert stager.in_flight == 1
    with device.use_stream(slow):
        torch.testing.assert_close(read(late), torch.ones(4))
    with device.use_stream(fast):
        torch.testing.assert_close(read(early), torch.zeros(4))


def test_copy_runs_on_the_current_stream(device: SimulatedDevice, stager: PinnedStager) -> None:
    side = device.create_stream("side")
    with device.use_stream(side):
        stager.upload(torch.ones(4), DEVICE)
    assert side.pending
    assert not device.default_stream.pending


@pytest.mark.parametrize("asked", ["1", "true", " YES ", "on"])
def test_blocking_switch_uploads_with_the_host_waiting(
    device: SimulatedDevice, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("OMNI_SPEECH_ACCEL_BLOCKING_COPY", asked)
    stager = PinnedStager(accelerator)
    uploaded = stager.upload(torch.ones(4), DEVICE)
    assert len(device.host_syncs) == 1
    assert stager.in_flight == 0
    torch.testing.assert_close(read(uploaded), torch.ones(4))


@pytest.mark.parametrize("asked", ["", "0", "false", "False", "no"])
def test_blocking_switch_that_says_no_is_no(
    device: SimulatedDevice, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("OMNI_SPEECH_ACCEL_BLOCKING_COPY", asked)
    PinnedStager(accelerator).upload(torch.ones(4), DEVICE)
    assert not device.host_syncs


def test_memory_that_cannot_be_pinned_is_a_plain_transfer_told_once(
    device: SimulatedDevice,
    accelerator: Accelerator,
    stager: PinnedStager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[torch.Tensor] = []

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        tried.append(tensor)
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(accelerator, "pin_memory", refuse)
    for value in (1.0, 2.0):
        uploaded = stager.upload(torch.full((4,), value), DEVICE)
        torch.testing.assert_close(read(uploaded), torch.full((4,), value))
    assert len(tried) == 1
    assert stager.in_flight == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert "operation not supported" in message
    assert "OMNI_SPEECH_ACCEL_BLOCKING_COPY=1" in message


def test_argument_overrides_the_environment(
    device: SimulatedDevice, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_SPEECH_ACCEL_BLOCKING_COPY", "1")
    PinnedStager(accelerator, blocking=False).upload(torch.ones(4), DEVICE)
    assert not device.host_syncs


def test_tensor_on_the_device_is_returned_as_it_is(device: SimulatedDevice, stager: PinnedStager) -> None:
    there = torch.ones(4, device=DEVICE)
    assert stager.upload(there, DEVICE) is there
    assert runtime.upload(there, "simulated") is there
    assert stager.in_flight == 0


def test_host_upload_is_the_same_tensor() -> None:
    mine = torch.ones(4)
    assert runtime.upload(mine, "cpu") is mine
    assert runtime.upload(mine, torch.device("cpu")) is mine


@pytest.mark.parametrize(
    "mine",
    [
        torch.arange(6.0),
        torch.arange(6).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12.0)[::2],
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.arange(3.0).expand(2, 3),
        torch.tensor(4.0),
        torch.tensor([True, False]),
        torch.empty(0, 80),
        torch.arange(4, dtype=torch.float16),
        torch.arange(4, dtype=torch.uint8),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}-{tensor.stride()}",
)
def test_upload_equals_the_plain_transfer(device: SimulatedDevice, stager: PinnedStager, mine: torch.Tensor) -> None:
    uploaded = stager.upload(mine, DEVICE)
    plain = mine.to(DEVICE)
    assert isinstance(uploaded, SimulatedTensor)
    assert uploaded.device == plain.device
    assert uploaded.dtype == plain.dtype
    assert uploaded.shape == plain.shape
    assert uploaded.stride() == plain.stride()
    assert torch.equal(read(uploaded), mine)


def test_pinned_input_is_copied_too(device: SimulatedDevice, accelerator: Accelerator, stager: PinnedStager) -> None:
    mine = accelerator.pin_memory(torch.ones(4))
    uploaded = stager.upload(mine, DEVICE)
    mine.fill_(9)
    torch.testing.assert_close(read(uploaded), torch.ones(4))


def test_threads_share_one_stager(device: SimulatedDevice, stager: PinnedStager) -> None:
    device.schedule = Schedule(7, eagerness=0.5)
    results: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        with device.use_stream(device.create_stream()):
            results[index] = [
                read(stager.upload(torch.full((3,), float(100 * index + step)), DEVICE)) for step in range(20)
            ]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for index in range(4):
        for step, value in enumerate(results[index]):
            assert torch.equal(value, torch.full((3,), float(100 * index + step)))
    stager.reclaim()
    assert stager.in_flight == 0


def test_upload_in_a_capture_is_refused_as_a_plain_transfer_is(
    device: SimulatedDevice, accelerator: Accelerator, stager: PinnedStager
) -> None:
    accelerator.prepare_capture(DEVICE)
    with pytest.raises(RuntimeError, match="needs the host to wait"):
        accelerator.capture(lambda: stager.upload(torch.ones(4), DEVICE), DEVICE, warmups=0)
    assert stager.in_flight == 0
