# SPDX-License-Identifier: Apache-2.0
"""``speaker_graph`` with the host's core on the simulated accelerator; tests/gpu runs the same on a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel.items import speaker_graph
from omni_speech_accel.plugin.session import session_of
from tests.items.conftest import only, session_for, simulate
from tests.simulator import read

KEY = "speaker_graph"


def feature(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(frames, 80, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def core(quick_core: Any, device: Any) -> Any:
    built = quick_core(session_for({**only("speaker_device"), KEY: {"max_graphs": 2}}))
    simulate(built)
    return built


def counts(core: Any) -> dict[str, float]:
    session = session_of(core)
    assert session is not None
    return {name: value for name, value in session.counters(KEY).snapshot().items() if "seconds" not in name}


def test_capture_call_and_replays_equal_the_eager_model(core: Any, stock_core: Any) -> None:
    for seed in range(3):
        on = read(core._forward_spk_embedding(feature(60, seed)))
        stock = stock_core._forward_spk_embedding(feature(60, seed))
        torch.testing.assert_close(on, stock, rtol=1e-4, atol=1e-4)
    assert counts(core) == {"captures": 1, "replays": 2}


def test_lengths_over_the_cap_run_eager_and_equal(core: Any, stock_core: Any) -> None:
    for frames in (40, 50, 60, 60, 40):
        on = read(core._forward_spk_embedding(feature(frames)))
        torch.testing.assert_close(on, stock_core._forward_spk_embedding(feature(frames)), rtol=1e-4, atol=1e-4)
    assert counts(core) == {"captures": 2, "eager": 2, "replays": 1}


def test_a_failing_capture_is_eager_for_good_and_the_request_is_served(core: Any, stock_core: Any, device: Any) -> None:
    device.fail("capture")
    for _ in range(2):
        on = read(core._forward_spk_embedding(feature(60)))
        torch.testing.assert_close(on, stock_core._forward_spk_embedding(feature(60)), rtol=1e-4, atol=1e-4)
    assert counts(core) == {"failures": 1, "eager": 2}


def test_no_host_wait_once_warm(core: Any, device: Any) -> None:
    read(core._forward_spk_embedding(feature(60)))
    with device.forbid_host_syncs():
        core._forward_spk_embedding(feature(60, 1))


def test_two_replicas_with_references_of_one_length_get_their_own_embedding(
    quick_core: Any, stock_core: Any, device: Any
) -> None:
    # The model is shared by the process; the second replica's stream runs while the first one's is held back.
    from omni_speech_accel import runtime

    replicas = [quick_core(session_for({**only("speaker_device"), KEY: True})) for _ in range(2)]
    for replica in replicas:
        simulate(replica)
    replicas[1]._spk_model = replicas[0]._spk_model
    accelerator = runtime.accelerator_for("simulated")
    streams = [accelerator.create_stream("simulated") for _ in range(2)]
    for replica in replicas:
        read(replica._forward_spk_embedding(feature(60, 9)))
    outputs = []
    for index, (replica, stream) in enumerate(zip(replicas, streams, strict=True)):
        with accelerator.use_stream(stream):
            outputs.append(replica._forward_spk_embedding(feature(60, index)))
    for index in (1, 0):
        with accelerator.use_stream(streams[index]):
            torch.testing.assert_close(
                read(outputs[index]), stock_core._forward_spk_embedding(feature(60, index)), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("model", [SimpleNamespace(run=None), SimpleNamespace(model=torch.nn.Identity(), _graphs={})])
def test_sessions_and_models_with_graphs_of_their_own_are_left_to_the_host(model: Any) -> None:
    core = SimpleNamespace(spk_model=model)
    result = speaker_graph.forward_spk_embedding(
        session_for(only(KEY)).item(KEY), lambda feat: ("host", feat), core, feature(10)
    )
    assert result[0] == "host"
