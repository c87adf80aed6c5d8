# SPDX-License-Identifier: Apache-2.0
"""The encoder of a cold group as graphs, on the simulated accelerator."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from omni_speech_accel.items import _prompt_encoder as prompt_encoder
from omni_speech_accel.items._prompt_encoder import PromptEncoder
from omni_speech_accel.runtime import PlainCounters
from tests.runtime.conftest import device  # noqa: F401
from tests.simulator import DEVICE_TYPE, SimulatedDevice


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pe = torch.arange(8, dtype=torch.float32, device=DEVICE_TYPE)


class Backend:
    """An encoder of one addition and one product, whose table grows with the chunk as the host's does."""

    def __init__(self) -> None:
        self.position = Position()
        self.flow = SimpleNamespace(encoder=self.position)
        self.calls: list[int] = []

    def _ensure_relpos_pe(self, tokens: torch.Tensor, att_cache: None) -> None:
        needed = int(tokens.shape[1])
        if needed > self.position.pe.shape[0]:
            self.position.pe = torch.arange(needed, dtype=torch.float32, device=DEVICE_TYPE)

    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._ensure_relpos_pe(tokens, None)
        self.calls.append(len(tokens))
        hidden = tokens * 2 + self.position.pe[: tokens.shape[1]]
        return hidden, hidden + 1, hidden + 2


@pytest.fixture
def graphed(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:  # noqa: F811
    monkeypatch.setattr(prompt_encoder, "GRAPHED", frozenset({DEVICE_TYPE}))
    monkeypatch.setattr(prompt_encoder, "BRANCHES", 1)  # the simulator records one stream
    return device


def rows(count: int, length: int = 6, start: float = 0.0) -> list[torch.Tensor]:
    return [torch.full((1, length), start + index).to(DEVICE_TYPE) for index in range(count)]


def values(encodings: Any) -> list[list[float]]:
    return [part.cpu().flatten().tolist() for encoding in encodings for part in encoding]


def expected(count: int, length: int = 6, start: float = 0.0) -> list[list[float]]:
    return [
        [2 * (start + index) + position + part for position in range(length)]
        for index in range(count)
        for part in range(3)
    ]


def make(max_graphs: int = 4) -> tuple[PromptEncoder, Backend, PlainCounters]:
    counters = PlainCounters()
    encoder, backend = PromptEncoder(torch.device(DEVICE_TYPE), counters, max_graphs), Backend()
    for length in (5, 6, 12):
        encoder.encode(backend, backend.encode, rows(1, length))
    backend.calls.clear()
    return encoder, backend, counters


def test_a_group_is_captured_once_and_replayed_with_its_own_tokens(graphed: SimulatedDevice) -> None:
    encoder, backend, counters = make()
    assert values(encoder.encode(backend, backend.encode, rows(3))) == expected(3)
    calls = len(backend.calls)
    assert values(encoder.encode(backend, backend.encode, rows(3, start=7.0))) == expected(3, start=7.0)
    assert len(backend.calls) == calls
    assert set(backend.calls) == {1}
    assert (counters.snapshot()["captures"], counters.snapshot()["replays"]) == (1, 1)


def test_each_group_size_and_length_has_its_graph_up_to_the_maximum(graphed: SimulatedDevice) -> None:
    encoder, backend, counters = make(max_graphs=2)
    for count, length in ((2, 6), (3, 6), (2, 5)):
        assert values(encoder.encode(backend, backend.encode, rows(count, length))) == expected(count, length)
    assert counters.snapshot()["captures"] == 2
    assert counters.snapshot()["eager"] == 1


def test_a_table_that_a_longer_reference_replaced_is_not_read_by_the_old_graph(graphed: SimulatedDevice) -> None:
    encoder, backend, counters = make()
    encoder.encode(backend, backend.encode, rows(2))
    encoder.encode(backend, backend.encode, rows(2, 20))  # grows the table
    backend.position.pe[0] = 100
    found = values(encoder.encode(backend, backend.encode, rows(2)))
    assert found[0][0] == 100
    assert counters.snapshot()["captures"] == 2


def test_the_first_group_of_a_length_runs_eagerly_since_it_may_replace_the_tables(graphed: SimulatedDevice) -> None:
    encoder, backend, counters = make()
    assert values(encoder.encode(backend, backend.encode, rows(2, 30))) == expected(2, 30)
    assert "captures" not in counters.snapshot()
    assert values(encoder.encode(backend, backend.encode, rows(2, 30, 3.0))) == expected(2, 30, 3.0)
    assert counters.snapshot()["captures"] == 1


def test_the_graph_keeps_the_table_that_it_reads_and_is_known_by(graphed: SimulatedDevice) -> None:
    encoder, backend, _ = make()
    encoder.encode(backend, backend.encode, rows(2))
    table = weakref.ref(backend.position.pe)
    encoder.encode(backend, backend.encode, rows(2, 20))  # replaces it
    gc.collect()
    assert backend.position.pe is not table()
    assert table() is not None


def test_a_failed_capture_leaves_the_group_eager(graphed: SimulatedDevice) -> None:
    encoder, backend, counters = make()

    def broken(tokens: torch.Tensor) -> Any:
        if graphed.current_stream.recording is not None:
            raise RuntimeError("no graph of this")
        return backend.encode(tokens)

    for start in (0.0, 5.0):
        assert values(encoder.encode(backend, broken, rows(2, start=start))) == expected(2, start=start)
    assert counters.snapshot()["failures"] == 1
    assert counters.snapshot()["eager"] == 2


def test_one_row_and_other_devices_take_the_hosts_call(graphed: SimulatedDevice) -> None:
    encoder, backend, counters = make()
    encoder.encode(backend, backend.encode, rows(1))
    assert counters.snapshot() == {}
    on_cpu = PromptEncoder(torch.device("cpu"), counters, 4)
    assert on_cpu.encode(backend, lambda tokens: (tokens,) * 3, [torch.zeros(1, 3)] * 2)[1][0].shape == (1, 3)
    assert counters.snapshot() == {}
