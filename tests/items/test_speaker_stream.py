# SPDX-License-Identifier: Apache-2.0
"""``speaker_stream`` with the host's core on the simulated accelerator; tests/gpu runs the same on a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_speech_accel import runtime
from tests.items.conftest import only, session_for, simulate
from tests.simulator import DEVICE, read


def feature(frames: int = 60, seed: int = 0) -> torch.Tensor:
    return torch.randn(frames, 80, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["eager", "graph"])
def core(request: Any, quick_core: Any, device: Any) -> Any:
    keys = ["sync_free_prompt", "speaker_device", "speaker_stream"] + ["speaker_graph"] * (request.param == "graph")
    built = quick_core(session_for(only(*keys)))
    simulate(built)
    read(built._forward_spk_embedding(feature(seed=9)))
    return built


def test_the_embedding_waits_for_no_backlog_of_the_callers_stream(core: Any, stock_core: Any, device: Any) -> None:
    backlog = torch.zeros(4, device=DEVICE)
    for _ in range(20):
        backlog += 1
    queued = device.current_stream.pending
    assert queued >= 20
    with device.forbid_host_syncs():
        out = core._forward_spk_embedding(feature())
    # The embedding's own stream can finish although nothing of the backlog has run.
    session_stream = stream_of(core)
    device.wait_for(session_stream)
    assert device.current_stream.pending >= queued
    torch.testing.assert_close(read(out), stock_core._forward_spk_embedding(feature()), rtol=1e-4, atol=1e-4)


def test_the_callers_stream_sees_the_finished_embedding(core: Any, stock_core: Any, device: Any) -> None:
    doubled = core._forward_spk_embedding(feature()) * 2
    torch.testing.assert_close(read(doubled), 2 * stock_core._forward_spk_embedding(feature()), rtol=1e-4, atol=1e-4)


def test_a_freed_embedding_is_not_overwritten_while_the_caller_still_reads_it(
    core: Any, stock_core: Any, device: Any
) -> None:
    out = core._forward_spk_embedding(feature())
    kept = out * 1
    del out
    for seed in range(1, 5):
        core._forward_spk_embedding(feature(seed=seed))
        device.wait_for(stream_of(core))
    torch.testing.assert_close(read(kept), stock_core._forward_spk_embedding(feature()), rtol=1e-4, atol=1e-4)


def test_a_device_feature_made_by_the_caller_is_waited_for(core: Any, stock_core: Any, device: Any) -> None:
    made = feature().to(DEVICE) * 0 + feature().to(DEVICE)
    torch.testing.assert_close(
        read(core._forward_spk_embedding(made)), stock_core._forward_spk_embedding(feature()), rtol=1e-4, atol=1e-4
    )


def test_an_onnxruntime_session_still_gets_its_host_feature(quick_core: Any, device: Any, stock_core: Any) -> None:
    core = quick_core(session_for(only("speaker_stream")))
    simulate(core)
    torch.testing.assert_close(
        read(core._forward_spk_embedding(feature())), stock_core._forward_spk_embedding(feature()), rtol=0, atol=0
    )


def stream_of(core: Any) -> Any:
    from omni_speech_accel.plugin.session import session_of

    session = session_of(core)
    assert session is not None
    private = session.state("speaker_stream", lambda: pytest.fail("no private stream was made"))
    assert isinstance(private, runtime.PrivateStream)
    return private._stream
