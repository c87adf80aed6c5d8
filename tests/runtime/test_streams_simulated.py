# SPDX-License-Identifier: Apache-2.0
"""The private stream on the simulated accelerator: what it waits for, who waits for it, and what is kept alive."""

from __future__ import annotations

import pytest
import torch

from omni_speech_accel.runtime import Accelerator, GraphCache, PrivateStream, accelerator_for
from tests.simulator import DEVICE, Schedule, SimulatedDevice, SimulatedStream, SimulatedTensor, read

SEEDS = range(24)
SHAPE = (2, 6)


def features(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def embed(value: torch.Tensor) -> torch.Tensor:
    return torch.tanh(value * 3).cumsum(-1)


def newcomers(count: int = 6) -> list[torch.Tensor]:
    """Tensors of the size under test, full of sevens: they take whatever memory the current stream may have."""
    return [torch.full(SHAPE, 7.0, device=DEVICE) for _ in range(count)]


@pytest.fixture
def private(accelerator: Accelerator) -> PrivateStream:
    return PrivateStream(accelerator, DEVICE)


def stream_of(device: SimulatedDevice) -> SimulatedStream:
    """The stream made last."""
    return device.streams[-1]


def test_host_input_does_not_wait_for_the_callers_backlog(device: SimulatedDevice, private: PrivateStream) -> None:
    backlog = torch.zeros(3, device=DEVICE) + 1
    queued = device.default_stream.pending
    private.run(embed, features(1))
    device.wait_for(stream_of(device))
    assert device.default_stream.pending == queued + 1, "the backlog is untouched, with the join behind it"
    assert (read(backlog) == 1).all()


def test_host_never_waits(device: SimulatedDevice, private: PrivateStream) -> None:
    made_by_caller = features(2).to(DEVICE) + 1
    with device.forbid_host_syncs():
        outputs = private.run(lambda a, b: embed(a) + b, features(1), made_by_caller)
    torch.testing.assert_close(read(outputs), embed(features(1)) + features(2) + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_result_is_complete_when_the_caller_uses_it(device: SimulatedDevice, private: PrivateStream, seed: int) -> None:
    device.schedule = Schedule(seed, eagerness=0.3)
    outputs = private.run(embed, features(1))
    torch.testing.assert_close(read(outputs + 1), embed(features(1)) + 1, rtol=0, atol=0)


def test_result_is_complete_even_where_the_private_stream_is_starved(
    device: SimulatedDevice, private: PrivateStream
) -> None:
    device.schedule = Schedule(starved=[stream_of(device)])
    outputs = private.run(embed, features(1))
    torch.testing.assert_close(read(outputs + 1), embed(features(1)) + 1, rtol=0, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_input_made_on_the_callers_stream_is_complete_before_it_is_read(
    device: SimulatedDevice, private: PrivateStream, seed: int
) -> None:
    device.schedule = Schedule(seed)
    made_by_caller = features(1).to(DEVICE) * 2
    outputs = private.run(embed, made_by_caller)
    torch.testing.assert_close(read(outputs), embed(features(1) * 2), rtol=0, atol=0)


def test_input_of_a_third_stream_lives_until_the_private_stream_has_read_it(
    device: SimulatedDevice, private: PrivateStream
) -> None:
    own = stream_of(device)
    third = device.create_stream("third")
    with device.use_stream(third):
        value = features(1).to(DEVICE) * 2
    device.drain()
    outputs = private.run(embed, value)
    del value
    # The third stream is ordered behind nobody, and gets its memory back.
    with device.use_stream(third):
        kept = newcomers()
        device.wait_for(third)
    assert own.pending
    torch.testing.assert_close(read(outputs), embed(features(1) * 2), rtol=0, atol=0)
    del kept


def test_output_freed_by_the_caller_lives_until_the_caller_has_read_it(
    device: SimulatedDevice, private: PrivateStream
) -> None:
    outputs = private.run(embed, features(1))
    consumed = outputs + 1  # queued on the caller's stream, not run
    del outputs
    device.wait_for(stream_of(device))
    with device.use_stream(stream_of(device)):
        kept = newcomers()
        device.wait_for(stream_of(device))
    torch.testing.assert_close(read(consumed), embed(features(1)) + 1, rtol=0, atol=0)
    del kept


def test_every_output_of_a_tree_is_kept_alive(device: SimulatedDevice, private: PrivateStream) -> None:
    outputs = private.run(lambda value: {"a": [value + 1, 5], "b": (value + 2,)}, features(1))
    consumed = outputs["a"][0] + outputs["b"][0]
    assert outputs["a"][1] == 5
    del outputs
    with device.use_stream(stream_of(device)):
        kept = newcomers()
        device.wait_for(stream_of(device))
    torch.testing.assert_close(read(consumed), features(1) * 2 + 3)
    del kept


def test_a_host_tensor_among_the_outputs_is_no_business_of_streams(
    device: SimulatedDevice, private: PrivateStream
) -> None:
    on_device, on_host = private.run(lambda value: (value + 1, torch.ones(2)), features(1))
    assert on_host.device.type == "cpu"
    torch.testing.assert_close(read(on_device), features(1) + 1)


def test_weights_still_being_uploaded_when_the_stream_is_made_are_seen_complete(
    device: SimulatedDevice, accelerator: Accelerator
) -> None:
    weight = torch.full(SHAPE, 2.0, device=DEVICE) * 3
    private = PrivateStream(accelerator, DEVICE)
    device.schedule = Schedule(starved=[device.default_stream])
    outputs = private.run(lambda value: value * weight, features(1))
    torch.testing.assert_close(read(outputs), features(1) * 6)


def test_capture_on_the_callers_stream_records_a_plain_call(
    device: SimulatedDevice, accelerator: Accelerator, private: PrivateStream
) -> None:
    value = features(1).to(DEVICE)
    accelerator.prepare_capture(DEVICE)
    graph = accelerator.capture(lambda: private.run(embed, value), DEVICE, warmups=0)
    value.copy_(features(2).to(DEVICE))
    graph.replay()
    torch.testing.assert_close(read(graph.outputs), embed(features(2)), rtol=0, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_graph_cache_on_the_private_stream_serves_two_callers(
    device: SimulatedDevice, accelerator: Accelerator, private: PrivateStream, seed: int
) -> None:
    cache = GraphCache("speaker", accelerator, DEVICE, max_graphs=1)
    device.schedule = Schedule(seed, eagerness=0.2)
    callers = [device.create_stream() for _ in range(2)]
    results = []
    for index in range(6):
        with device.use_stream(callers[index % 2]):
            results.append(private.run(lambda value: cache.run(6, embed, value), features(index)) + 1)
    for index, result in enumerate(results):
        with device.use_stream(callers[index % 2]):
            torch.testing.assert_close(read(result), embed(features(index)) + 1, rtol=0, atol=0)


def test_error_of_the_function_leaves_the_callers_stream_selected(
    device: SimulatedDevice, private: PrivateStream
) -> None:
    def broken(value: torch.Tensor) -> torch.Tensor:
        raise ValueError("reference is empty")

    with pytest.raises(ValueError, match="reference is empty"):
        private.run(broken, features(1))
    assert device.current_stream is device.default_stream
    torch.testing.assert_close(read(private.run(embed, features(1))), embed(features(1)))


def test_without_streams_the_function_is_called_plainly() -> None:
    private = PrivateStream(accelerator_for("cpu"), "cpu")
    seen: list[torch.Tensor] = []
    value = features(1)

    def look(value: torch.Tensor) -> torch.Tensor:
        seen.append(value)
        return value

    assert private.run(look, value) is value
    assert seen[0] is value
    assert not isinstance(value, SimulatedTensor)
