# SPDX-License-Identifier: Apache-2.0
"""``s3_graph`` with the host's tokenizer on the simulated accelerator; tests/gpu runs the same on a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_speech_accel.items import s3_graph
from omni_speech_accel.items._prompt import S3_MAX_FRAMES
from omni_speech_accel.plugin.session import session_of
from tests.items.conftest import only, session_for, simulate
from tests.simulator import DEVICE, read

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
    assert counts(core) == {"captures": 2, "eager": 2, "replays": 1}


def test_a_failing_first_replay_is_eager_for_good(core: Any, stock_core: Any, device: Any) -> None:
    device.fail("replay")
    check(core, stock_core, 40)
    check(core, stock_core, 40, 1)
    assert counts(core) == {"failures": 1, "eager": 2}


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
