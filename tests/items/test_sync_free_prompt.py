# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_speech_accel.items._prompt import S3_MAX_FRAMES, quantize_short
from omni_speech_accel.items.sync_free_prompt import AsyncUploads
from omni_speech_accel.plugin.session import session_of
from tests.items.conftest import only, session_for, simulate

KEY = "sync_free_prompt"


@pytest.fixture(scope="module")
def core(core_factory: Any) -> Any:
    return core_factory(session_for(only(KEY)))


def assert_stock(on: tuple[Any, ...], stock: tuple[Any, ...]) -> None:
    assert len(on) == len(stock) == 5
    for mine, theirs in zip(on, stock, strict=True):
        assert (mine.dtype, mine.device, mine.shape, mine.stride()) == (
            theirs.dtype,
            theirs.device,
            theirs.shape,
            theirs.stride(),
        )
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "reference",
    [
        {"seconds": 2.0},
        {"seconds": 0.5},
        {"seconds": 1.37, "rate": 8000},
        {"seconds": 1.5, "rate": 48000},
        {"seconds": 1.5, "rate": 44100, "channels": 2},
        {"seconds": 1.5, "rate": 24000, "subtype": "PCM_24"},
        {"seconds": 1.5, "rate": 24000, "subtype": "FLOAT"},
        {"seconds": 1.5, "rate": 22050, "format": "FLAC"},
    ],
    ids=str,
)
def test_every_tensor_is_stocks_bit_for_bit(core: Any, stock_core: Any, wav: Any, reference: dict[str, Any]) -> None:
    path = wav(**reference)
    with torch.inference_mode():
        assert_stock(core._prepare_prompt(path), stock_core._prepare_prompt(path))


def test_digital_silence_is_stocks_and_finite(core: Any, stock_core: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "silence.wav")
    soundfile.write(path, np.zeros(16000, np.float32), 16000)
    on = core._prepare_prompt(path)
    assert_stock(on, stock_core._prepare_prompt(path))
    assert all(torch.isfinite(value).all() for value in on)


@pytest.mark.parametrize("samples", [0, 160])
def test_audio_that_stock_refuses_is_refused_with_stocks_error(
    core: Any, stock_core: Any, tmp_path: Any, samples: int
) -> None:
    path = str(tmp_path / "short.wav")
    soundfile.write(path, np.zeros(samples, np.float32), 16000)
    outcomes = []
    for each in (stock_core, core):
        try:
            outcomes.append(("ok", [tuple(value.shape) for value in each._prepare_prompt(path)]))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    assert outcomes[0] == outcomes[1]


def test_a_missing_file_is_stocks_error(core: Any, stock_core: Any) -> None:
    with pytest.raises(Exception) as stock:
        stock_core._prepare_prompt("/nowhere.wav")
    with pytest.raises(type(stock.value)) as on:
        core._prepare_prompt("/nowhere.wav")
    assert str(on.value) == str(stock.value)


@pytest.mark.parametrize("frames", [1, 2, 99, 2999, S3_MAX_FRAMES])
def test_the_short_path_is_the_librarys_result(core: Any, stock_core: Any, frames: int) -> None:
    mel = torch.randn(1, 128, frames, generator=torch.Generator().manual_seed(frames))
    lengths = torch.tensor([frames], dtype=torch.int32)
    counters = session_of(core).counters(KEY)  # type: ignore[union-attr]
    before = counters.snapshot().get("short", 0)
    on = core.audio_tokenizer.quantize(mel, lengths)
    stock = stock_core.audio_tokenizer.quantize(mel, lengths)
    assert counters.snapshot()["short"] == before + 1
    assert torch.equal(on[0], stock[0])
    assert torch.equal(on[1], stock[1])
    assert (on[0].dtype, on[1].dtype) == (stock[0].dtype, stock[1].dtype)


def test_audio_over_one_window_is_left_to_the_library(core: Any, stock_core: Any) -> None:
    mel = torch.randn(1, 128, S3_MAX_FRAMES + 1, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([S3_MAX_FRAMES + 1], dtype=torch.int32)
    counters = session_of(core).counters(KEY)  # type: ignore[union-attr]
    before = dict(counters.snapshot())
    on = core.audio_tokenizer.quantize(mel, lengths)
    stock = stock_core.audio_tokenizer.quantize(mel, lengths)
    assert counters.snapshot()["long"] == before.get("long", 0) + 1
    assert counters.snapshot().get("short", 0) == before.get("short", 0)
    assert torch.equal(on[0], stock[0])
    assert torch.equal(on[1], stock[1])


@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(20, 120), min_size=1, max_size=3))
def test_padded_batches_take_the_same_path_as_the_library(core: Any, stock_core: Any, lengths: list[int]) -> None:
    mel = torch.randn(len(lengths), 128, max(lengths), generator=torch.Generator().manual_seed(sum(lengths)))
    mel_len = torch.tensor(lengths, dtype=torch.int32)
    on = core.audio_tokenizer.quantize(mel, mel_len)
    stock = stock_core.audio_tokenizer.quantize(mel, mel_len)
    assert torch.equal(on[0], stock[0])
    assert torch.equal(on[1], stock[1])


def test_a_core_without_the_item_calls_the_library(quick_core: Any) -> None:
    off = quick_core(session_for(only()))
    mel = torch.randn(1, 128, 50)
    off.audio_tokenizer.quantize(mel, torch.tensor([50], dtype=torch.int32))
    assert session_of(off).snapshot() == {}  # type: ignore[union-attr]


class TestUploads:
    """On the simulated device, which fails on any wait of the host."""

    @pytest.fixture(autouse=True)
    def _device(self, device: Any) -> None:
        self.device = device

    def test_a_prompt_is_prepared_without_one_host_wait(self, quick_core: Any, wav: Any, stock_core: Any) -> None:
        from tests.simulator import read

        core = quick_core(session_for(only(KEY)))
        simulate(core)
        path = wav(1.0)
        with torch.inference_mode():
            with self.device.forbid_host_syncs():
                on = core._prepare_prompt(path)
            for mine, theirs in zip(on, stock_core._prepare_prompt(path), strict=True):
                assert mine.device.type == "simulated"
                torch.testing.assert_close(read(mine), theirs, rtol=1e-5, atol=1e-5)

    def test_stock_waits_there(self, quick_core: Any, wav: Any) -> None:
        # The test above would prove nothing if the simulated device never saw stock wait.
        from tests.simulator import SynchronisedError

        core = quick_core(session_for(only()))
        simulate(core)
        with torch.inference_mode(), self.device.forbid_host_syncs(), pytest.raises(SynchronisedError):
            core._prepare_prompt(wav(1.0))

    @pytest.mark.parametrize(
        "upload",
        [
            lambda value, device: value.to(device),
            lambda value, device: value.to(device, non_blocking=True),
            lambda value, device: value.to(device=device),
            lambda value, device: value.to(str(device)),
            lambda value, device: torch.tensor([[1, 2], [3, 4]], device=device),
            lambda value, device: torch.tensor(np.float32([1.5, 2.5]), device=device),
            lambda value, device: torch.tensor([7], dtype=torch.int32, device=device),
        ],
    )
    def test_each_form_of_upload_is_asynchronous_and_exact(self, upload: Any) -> None:
        from tests.simulator import DEVICE, read

        value = torch.randn(3, 5)
        plain = upload(value, torch.device("cpu"))
        with AsyncUploads(DEVICE), self.device.forbid_host_syncs():
            staged = upload(value, DEVICE)
        assert staged.device == DEVICE
        assert staged.dtype == plain.dtype
        assert torch.equal(read(staged), plain)

    def test_a_change_of_dtype_is_left_to_torch(self) -> None:
        from tests.simulator import DEVICE, read

        value = torch.randn(3)
        with AsyncUploads(DEVICE):
            converted = value.to(DEVICE, torch.float64)
        assert torch.equal(read(converted), value.double())

    def test_other_copies_are_untouched(self) -> None:
        from tests.simulator import DEVICE

        value = torch.randn(3)
        with AsyncUploads(DEVICE):
            assert value.to("cpu") is value
            assert torch.equal(value.to(torch.float64), value.double())
            assert torch.tensor([1.0]).device.type == "cpu"
            assert torch.tensor([1.0], device="cpu").device.type == "cpu"


def test_quantize_short_is_the_librarys_else_branch(stock_core: Any) -> None:
    tokenizer = stock_core.audio_tokenizer
    mel = torch.randn(1, 128, 60, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([60], dtype=torch.int32)
    for mine, theirs in zip(quantize_short(tokenizer, mel, lengths), tokenizer.quantize(mel, lengths), strict=True):
        assert torch.equal(mine, theirs)


def test_the_rotary_table_stands_on_the_device_once_loaded(core: Any, stock_core: Any) -> None:
    assert torch.equal(core.audio_tokenizer.encoder.freqs_cis, stock_core.audio_tokenizer.encoder.freqs_cis)
