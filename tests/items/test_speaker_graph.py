# SPDX-License-Identifier: Apache-2.0
"""``speaker_graph`` with the host's core on the simulated accelerator; tests/gpu runs the same on a real one."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel.items import speaker_graph
from omni_speech_accel.plugin.session import session_of
from tests.items.conftest import only, session_for, simulate
from tests.simulator import Schedule, read

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
    assert counts(core) == {"captures": 2, "eager": 2, "eager_cap": 2, "replays": 1}


def test_a_failing_capture_is_eager_for_good_and_the_request_is_served(core: Any, stock_core: Any, device: Any) -> None:
    device.fail("capture")
    for _ in range(2):
        on = read(core._forward_spk_embedding(feature(60)))
        torch.testing.assert_close(on, stock_core._forward_spk_embedding(feature(60)), rtol=1e-4, atol=1e-4)
    assert counts(core) == {"failures": 1, "eager": 2, "eager_failed": 2}


def test_no_host_wait_once_warm(core: Any, device: Any) -> None:
    read(core._forward_spk_embedding(feature(60)))
    with device.forbid_host_syncs():
        core._forward_spk_embedding(feature(60, 1))


def check(core: Any, stock_core: Any, frames: int, seed: int = 0) -> None:
    torch.testing.assert_close(
        read(core._forward_spk_embedding(feature(frames, seed))),
        stock_core._forward_spk_embedding(feature(frames, seed)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_two_streams_of_a_stage_with_references_of_one_length_get_their_own_embedding(
    core: Any, stock_core: Any, device: Any
) -> None:
    check(core, stock_core, 60, 9)
    device.drain()
    device.schedule = Schedule(seed=0)  # the device takes an operation of either stream, as it comes
    streams = [device.create_stream() for _ in range(2)]
    outputs = []
    for index, stream in enumerate(streams):
        with device.use_stream(stream):
            outputs.append(core._forward_spk_embedding(feature(60, index)))
    for index, stream in enumerate(streams):
        with device.use_stream(stream):
            on, stock = read(outputs[index]), stock_core._forward_spk_embedding(feature(60, index))
            torch.testing.assert_close(on, stock, rtol=1e-4, atol=1e-4)
    assert counts(core) == {"captures": 1, "replays": 2}


def louder(core: Any) -> Any:
    """The core's CAM++ with other weights: every embedding has the opposite sign."""
    model = copy.copy(core._spk_model)
    model.model = copy.deepcopy(model.model)
    flipped = model.model.forward
    model.model.forward = lambda value: -flipped(value)
    return model


def test_a_model_that_takes_the_place_of_a_captured_one_answers_itself(core: Any, stock_core: Any) -> None:
    for _ in range(2):
        check(core, stock_core, 60)
    core._spk_model = louder(core)
    for _ in range(2):
        replaced = -read(core._forward_spk_embedding(feature(60)))
        torch.testing.assert_close(replaced, stock_core._forward_spk_embedding(feature(60)), rtol=1e-4, atol=1e-4)
    assert counts(core) == {"captures": 2, "replays": 2}


def test_two_cores_of_one_stage_each_answer_with_their_own_model(core: Any, stock_core: Any) -> None:
    other = copy.copy(core)
    other._spk_model = louder(core)
    for seed in range(2):
        check(core, stock_core, 60, seed)
        replaced = -read(other._forward_spk_embedding(feature(60, seed)))
        torch.testing.assert_close(replaced, stock_core._forward_spk_embedding(feature(60, seed)), rtol=1e-4, atol=1e-4)
    assert counts(core) == {"captures": 2, "replays": 2}


@pytest.mark.parametrize("model", [SimpleNamespace(run=None), SimpleNamespace(model=torch.nn.Identity(), _graphs={})])
def test_sessions_and_models_with_graphs_of_their_own_are_left_to_the_host(model: Any) -> None:
    core = SimpleNamespace(spk_model=model)
    result = speaker_graph.forward_spk_embedding(
        session_for(only(KEY)).item(KEY), lambda feat: ("host", feat), core, feature(10)
    )
    assert result[0] == "host"
