# SPDX-License-Identifier: Apache-2.0
"""``s3_graph`` with the host's tokenizer on the simulated accelerator; tests/gpu runs the same on a real one."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel.items import s3_graph, sync_free_prompt
from omni_speech_accel.items._prompt import S3_MAX_FRAMES
from omni_speech_accel.plugin.session import session_of
from tests.items.conftest import only, session_for, simulate
from tests.simulator import DEVICE, Schedule, read

KEY = "s3_graph"


def mel(frames: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 128, frames, generator=torch.Generator().manual_seed(seed)), torch.tensor(
        [frames], dtype=torch.int32
    )


@pytest.fixture
def core(quick_core: Any, device: Any) -> Any:
    built = quick_core(session_for({**only(), KEY: {"max_graphs": 2}}))
    simulate(built)
    return built


def counts(core: Any) -> dict[str, float]:
    session = session_of(core)
    assert session is not None
    return {name: value for name, value in session.counters(KEY).snapshot().items() if "seconds" not in name}


def check(core: Any, stock_core: Any, frames: int, seed: int = 0) -> None:
    values, lengths = mel(frames, seed)
    on = core._audio_tokenizer.quantize(values.to(DEVICE), lengths.to(DEVICE))
    stock = stock_core.audio_tokenizer.quantize(values, lengths)
    for mine, theirs in zip(on, stock, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(read(mine), theirs)


def test_capture_call_and_replays_give_the_librarys_codes_and_lengths(core: Any, stock_core: Any) -> None:
    for seed in range(3):
        check(core, stock_core, 40, seed)
    assert counts(core) == {"captures": 1, "replays": 2}


def test_many_lengths_stay_within_the_cap_and_equal(core: Any, stock_core: Any) -> None:
    for frames in (40, 44, 48, 52, 40):
        check(core, stock_core, frames)
    assert counts(core) == {"captures": 2, "eager": 2, "eager_cap": 2, "replays": 1}


def test_a_failing_first_replay_is_eager_for_good(core: Any, stock_core: Any, device: Any) -> None:
    device.fail("replay")
    check(core, stock_core, 40)
    check(core, stock_core, 40, 1)
    assert counts(core) == {"failures": 1, "eager": 2, "eager_failed": 2}


def test_two_streams_of_a_stage_with_references_of_one_length_get_their_own_codes(
    core: Any, stock_core: Any, device: Any
) -> None:
    check(core, stock_core, 40)
    device.drain()
    device.schedule = Schedule(seed=0)  # the device takes an operation of either stream, as it comes
    streams = [device.create_stream() for _ in range(2)]
    outputs = []
    for seed, stream in enumerate(streams):
        with device.use_stream(stream):
            outputs.append(core._audio_tokenizer.quantize(*(value.to(DEVICE) for value in mel(40, seed)))[0])
    for seed, stream in enumerate(streams):
        with device.use_stream(stream):
            assert torch.equal(read(outputs[seed]), stock_core.audio_tokenizer.quantize(*mel(40, seed))[0])
    assert counts(core) == {"captures": 1, "replays": 2}


def test_each_tokenizer_of_a_stage_answers_with_its_own_weights(core: Any, stock_core: Any) -> None:
    for _ in range(2):
        check(core, stock_core, 40)
    values, lengths = mel(40)
    stock = copy.deepcopy(stock_core.audio_tokenizer)
    other = copy.deepcopy(core._audio_tokenizer)
    for tokenizer in (stock, other):
        tokenizer.quantizer.encode = lambda hidden, encode=tokenizer.quantizer.encode: encode(-hidden)
    for _ in range(2):
        on = other.quantize(values.to(DEVICE), lengths.to(DEVICE))[0]
        assert torch.equal(read(on), stock.quantize(values, lengths)[0])
        check(core, stock_core, 40)
    assert counts(core) == {"captures": 2, "replays": 4}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("module", [s3_graph, sync_free_prompt])
def test_the_rotary_table_is_moved_to_the_device_at_load(module: Any) -> None:
    encoder = SimpleNamespace(freqs_cis=torch.polar(torch.ones(4), torch.arange(4.0)))
    core = SimpleNamespace(
        _models_loaded=False, _audio_tokenizer=SimpleNamespace(encoder=encoder), device=torch.device(DEVICE)
    )
    module.ensure_models_loaded(session_for(only(KEY)).item(KEY), lambda: setattr(core, "_models_loaded", True), core)
    assert encoder.freqs_cis.device == torch.device(DEVICE)


@pytest.mark.usefixtures("device")
def test_lengths_on_the_host_are_left_to_the_library() -> None:
    values, lengths = mel(40)
    values = values.to(DEVICE)

    def library(*given: torch.Tensor) -> str:
        assert given[0] is values
        assert given[1] is lengths
        return "stock"

    assert s3_graph.quantize(session_for(only(KEY)).item(KEY), library, None, values, lengths) == "stock"


def test_a_call_with_tensors_elsewhere_does_not_bind_the_graphs_to_their_device(core: Any, stock_core: Any) -> None:
    with pytest.raises(Exception, match=r"device|simulated"):
        core._audio_tokenizer.quantize(*mel(40))
    check(core, stock_core, 40)
    assert counts(core)["captures"] == 1


def test_audio_over_one_window_is_left_to_the_library() -> None:
    session = session_for(only(KEY))
    values, lengths = mel(S3_MAX_FRAMES + 1)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    result = s3_graph.quantize(session.item(KEY), lambda *given: seen.append(given) or "stock", None, values, lengths)  # type: ignore[func-returns-value]
    assert result == "stock"
    assert seen[0][0] is values
    assert seen[0][1] is lengths
    assert session.snapshot() == {KEY: {"long": 1}}


def test_no_host_wait_once_warm(core: Any, device: Any) -> None:
    values, lengths = (value.to(DEVICE) for value in mel(40))
    read(core._audio_tokenizer.quantize(values, lengths)[0])
    with device.forbid_host_syncs():
        core._audio_tokenizer.quantize(values, lengths)
