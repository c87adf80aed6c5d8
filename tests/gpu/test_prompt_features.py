# SPDX-License-Identifier: Apache-2.0
"""The prompt-feature items on a real accelerator: equal to stock, asynchronous, and safe across streams."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_speech_accel.measure.driver import PromptDriver
from omni_speech_accel.plugin.table import PATCHES
from omni_speech_accel.runtime import accelerator_for

pytestmark = [pytest.mark.gpu, pytest.mark.npu]

ITEMS = ("sync_free_prompt", "speaker_device", "speaker_graph", "speaker_stream", "s3_graph")


def block(*keys: str) -> dict[str, bool]:
    return {patch.key: patch.key in keys for patch in PATCHES}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omni_speech_accel.synthetic.references import reference_wavs

    return reference_wavs(tmp_path_factory.mktemp("references"))[0]


@pytest.fixture(scope="module")
def stock(platform: str, checkpoint_dir: Path) -> Iterator[PromptDriver]:
    driver = PromptDriver(checkpoint_dir, platform)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def on(platform: str, checkpoint_dir: Path) -> Iterator[PromptDriver]:
    driver = PromptDriver(checkpoint_dir, platform, block=block(*ITEMS))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def eager(platform: str, checkpoint_dir: Path) -> Iterator[PromptDriver]:
    driver = PromptDriver(checkpoint_dir, platform, block=block("speaker_device"))
    yield driver
    driver.close()


def test_every_item_is_on(on: PromptDriver) -> None:
    assert on.session.not_applied == {}


@pytest.mark.parametrize("run", range(3))
def test_features_equal_stock(on: PromptDriver, stock: PromptDriver, reference: Path, run: int) -> None:
    mine, theirs = on.features(reference), stock.features(reference)
    for name, value in theirs.items():
        assert (mine[name].dtype, mine[name].shape, mine[name].device) == (value.dtype, value.shape, value.device)
        if name == "speaker embedding":
            assert float((mine[name] - value).norm() / value.norm()) <= 2e-5
            assert float(torch.cosine_similarity(mine[name], value)) >= 0.99999
        else:
            assert torch.equal(mine[name], value), f"{name}: {int((mine[name] != value).sum())} differ"


@pytest.mark.parametrize("frames", [97, 250, 598])
def test_capture_and_replay_equal_eager_campplus(
    on: PromptDriver, eager: PromptDriver, platform: str, checkpoint_dir: Path, frames: int
) -> None:
    graphed = PromptDriver(checkpoint_dir, platform, block=block("speaker_device", "speaker_graph"))
    for seed in range(3):
        feature = torch.randn(frames, 80, generator=torch.Generator().manual_seed(seed))
        one, two = graphed.core._forward_spk_embedding(feature), eager.core._forward_spk_embedding(feature)
        assert float((one - two).norm() / two.norm()) <= 1e-5
    assert graphed.session.snapshot()["speaker_graph"]["captures"] == 1
    graphed.close()


@pytest.mark.parametrize("frames", [50, 300, 600, 3000])
def test_capture_and_replay_equal_the_librarys_quantize(
    on: PromptDriver, stock: PromptDriver, device: torch.device, platform: str, checkpoint_dir: Path, frames: int
) -> None:
    graphed = PromptDriver(checkpoint_dir, platform, block=block("s3_graph"))
    lengths = torch.tensor([frames], dtype=torch.int32, device=device)
    for seed in range(3):
        mel = torch.randn(1, 128, frames, generator=torch.Generator().manual_seed(seed)).to(device)
        mine = graphed.core.audio_tokenizer.quantize(mel, lengths)
        theirs = stock.core.audio_tokenizer.quantize(mel, lengths)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    assert graphed.session.snapshot()["s3_graph"]["captures"] == 1
    graphed.close()


def test_audio_over_one_window_is_stocks(on: PromptDriver, stock: PromptDriver, device: torch.device) -> None:
    mel = torch.randn(1, 128, 3001, generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.tensor([3001], dtype=torch.int32, device=device)
    mine = on.core.audio_tokenizer.quantize(mel, lengths)
    theirs = stock.core.audio_tokenizer.quantize(mel, lengths)
    assert torch.equal(mine[0], theirs[0])


def test_two_replicas_on_two_streams_get_their_own_embedding(
    platform: str, checkpoint_dir: Path, eager: PromptDriver, device: torch.device
) -> None:
    if platform != "cuda":
        pytest.skip("the delay is made with a CUDA sleep kernel; the simulated device tests the same order")
    replicas = [
        PromptDriver(checkpoint_dir, platform, block=block("speaker_device", "speaker_graph")) for _ in range(2)
    ]
    features = [torch.randn(400, 80, generator=torch.Generator().manual_seed(seed)).to(device) for seed in range(2)]
    expected = [eager.core._forward_spk_embedding(feature) for feature in features]
    for replica in replicas:
        replica.core._forward_spk_embedding(features[0])
    accelerator = accelerator_for(device)
    accelerator.synchronize(device)
    streams = [accelerator.create_stream(device) for _ in range(2)]
    for _ in range(5):
        outputs = []
        for index in range(2):
            with accelerator.use_stream(streams[index]):
                if index == 0:
                    torch.cuda._sleep(50_000_000)
                outputs.append(replicas[index].core._forward_spk_embedding(features[index]))
        accelerator.synchronize(device)
        for index in range(2):
            assert float((outputs[index] - expected[index]).norm() / expected[index].norm()) <= 1e-5
    for replica in replicas:
        replica.close()


def test_the_host_never_waits_once_warm(on: PromptDriver, reference: Path, platform: str) -> None:
    if platform != "cuda":
        pytest.skip("torch's sync debug mode is CUDA's; the simulated device counts waits for an NPU")
    with torch.inference_mode():
        on.core._prepare_prompt(str(reference))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            on.core._prepare_prompt(str(reference))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_stock_waits_there(stock: PromptDriver, reference: Path, platform: str) -> None:
    # The test above would prove nothing if the debug mode did not see stock wait.
    if platform != "cuda":
        pytest.skip("torch's sync debug mode is CUDA's")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode(), pytest.raises(RuntimeError, match="synchronizing"):
            stock.core._prepare_prompt(str(reference))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_backlog_of_decode_work_does_not_hold_the_host(on: PromptDriver, reference: Path, platform: str) -> None:
    if platform != "cuda":
        pytest.skip("the backlog is made with a CUDA sleep kernel")
    core = on.core

    cycles = 400_000_000

    def once(backlog: bool) -> tuple[float, float]:
        """Milliseconds that the host waited before the call, and that the call took it.

        Both arms wait out the same work first: the CPU threads of the featurisation have then slept in both.
        """
        started = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        waited = (time.perf_counter() - started) * 1e3
        if backlog:
            torch.cuda._sleep(cycles)
        started = time.perf_counter()
        core._prepare_prompt(str(reference))
        took = (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize()
        return waited, took

    with torch.inference_mode():
        for backlog in (False, True):
            once(backlog)
        turns = [(once(False), once(True)) for _ in range(7)]
    held = min(waited for turn in turns for waited, _ in turn)
    idle, queued = (min(turn[arm][1] for turn in turns) for arm in (0, 1))
    figures = f"idle {idle:.1f} ms, with {held:.1f} ms of work queued {queued:.1f} ms"
    assert held > 4 * idle, figures
    # One wait for the device would add what is left of the work, most of `held`; a twentieth is a busy machine's noise.
    assert queued <= idle + held / 20, figures


SANITIZED = """
import sys, torch
from pathlib import Path
from omni_speech_accel.measure.driver import PromptDriver, ready_platform
from omni_speech_accel.plugin.table import PATCHES
items = {items!r}
platform = ready_platform()
driver = PromptDriver(Path({model!r}), platform, block={{patch.key: patch.key in items for patch in PATCHES}})
other = torch.cuda.Stream()
with torch.inference_mode():
    for stream in (torch.cuda.current_stream(), other, torch.cuda.current_stream(), other):
        with torch.cuda.stream(stream):
            values = driver.core._prepare_prompt({reference!r})
            sum(value.float().sum() for value in values)
torch.cuda.synchronize()
print("sanitized run finished")
"""


def test_torchs_stream_sanitizer_reports_nothing(checkpoint_dir: Path, reference: Path, platform: str) -> None:
    if platform != "cuda":
        pytest.skip("the sanitizer is CUDA's")
    code = SANITIZED.format(items=ITEMS, model=str(checkpoint_dir), reference=str(reference))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    output: Any = done.stdout + done.stderr
    assert "sanitized run finished" in output, output[-4000:]
    assert "CSAN detected" not in output, output[-4000:]
