# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from omni_speech_accel.campplus import model as campplus
from omni_speech_accel.campplus.model import Campplus, CampplusParityError, build_campplus, load_campplus
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank
from omni_speech_accel.tolerance import DeviceTolerances, Tolerance
from tests.campplus.conftest import TOLERANCES


class TestTheEmbedding:
    """Stock's is made by ``torch.tensor``: ordinary outside inference mode, whatever made it."""

    @pytest.fixture(scope="class")
    def made(self, onnx_path: Path) -> Campplus:
        return build_campplus(onnx_path)

    def test_may_be_written_in_place(self, made: Campplus) -> None:
        embedding = made(torch.from_numpy(speech_like_fbank(60)))
        expected = embedding.clone() * 2
        assert torch.equal(embedding.mul_(2), expected)

    def test_feeds_a_layer_under_grad(self, made: Campplus) -> None:
        layer = torch.nn.Linear(192, 4)
        layer(made(torch.from_numpy(speech_like_fbank(60)))).sum().backward()
        assert layer.weight.grad is not None

    def test_is_an_inference_tensor_only_where_stocks_is(self, made: Campplus) -> None:
        feat = torch.from_numpy(speech_like_fbank(60))
        assert not made(feat).is_inference()
        with torch.inference_mode():
            assert made(feat).is_inference() == torch.tensor([1.0]).is_inference()

    def test_built_in_inference_mode_it_is_ordinary_too(self, onnx_path: Path) -> None:
        with torch.inference_mode():
            made = build_campplus(onnx_path)
        assert not made(torch.from_numpy(speech_like_fbank(60))).is_inference()

    def test_asks_for_no_grad_of_its_input(self, made: Campplus) -> None:
        assert not made(torch.from_numpy(speech_like_fbank(60)).requires_grad_()).requires_grad


class TestLoading:
    @pytest.fixture
    def copy(self, onnx_path: Path, tmp_path: Path) -> Path:
        return Path(shutil.copy(onnx_path, tmp_path / "campplus.onnx"))

    @pytest.fixture
    def builds(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Paths that were built; the gate is left out, it has its own tests."""
        built: list[str] = []
        real = build_campplus

        def counting(path: str, device: Any = "cpu") -> Campplus:
            built.append(str(path))
            return real(path, device)

        monkeypatch.setattr(campplus, "build_campplus", counting)
        monkeypatch.setattr(campplus, "check_parity", lambda model, path, tolerances: None)
        return built

    def test_threads_share_one_model_built_once(self, copy: Path, builds: list[str]) -> None:
        gate = threading.Barrier(8)

        def load(_: int) -> Campplus:
            gate.wait()
            return load_campplus(copy, "cpu", TOLERANCES)

        with ThreadPoolExecutor(8) as pool:
            models = set(pool.map(load, range(8)))
        assert len(models) == 1
        assert builds == [str(copy)]

    def test_a_relative_path_and_a_device_object_name_the_same_model(
        self, copy: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = load_campplus(copy, "cpu", TOLERANCES)
        monkeypatch.chdir(copy.parent)
        assert load_campplus("campplus.onnx", torch.device("cpu"), TOLERANCES) is first
        assert len(builds) == 1

    def test_two_devices_do_not_share(self, copy: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(campplus, "_bits", lambda campplus: ())  # The meta device has none.
        first, second = load_campplus(copy, "cpu", TOLERANCES), load_campplus(copy, "meta", TOLERANCES)
        assert first is not second
        assert load_campplus(copy, "cpu", TOLERANCES) is first
        assert load_campplus(copy, "meta", TOLERANCES) is second

    def test_a_replaced_file_is_read_anew(self, copy: Path, builds: list[str]) -> None:
        first = load_campplus(copy, "cpu", TOLERANCES)
        stat = copy.stat()
        os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
        second = load_campplus(copy, "cpu", TOLERANCES)
        assert second is not first
        assert load_campplus(copy, "cpu", TOLERANCES) is second
        assert len(builds) == 2

    def test_a_file_replaced_with_its_size_and_time_kept_is_read_anew(self, copy: Path, builds: list[str]) -> None:
        first = load_campplus(copy, "cpu", TOLERANCES)
        stat = copy.stat()
        other = copy.with_name("other.onnx")
        shutil.copy(copy, other)
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.rename(copy)
        assert copy.stat().st_mtime_ns == stat.st_mtime_ns
        assert load_campplus(copy, "cpu", TOLERANCES) is not first

    def test_replaced_external_data_is_read_anew(self, copy: Path, builds: list[str]) -> None:
        model = onnx.load(str(copy))
        copy.unlink()
        onnx.save(model, str(copy), save_as_external_data=True, location="weights.bin")
        data = copy.with_name("weights.bin")
        first = load_campplus(copy, "cpu", TOLERANCES)
        assert load_campplus(copy, "cpu", TOLERANCES) is first
        graph, content = copy.read_bytes(), data.read_bytes()
        data.write_bytes((np.frombuffer(content, np.float32) * np.float32(0.5)).tobytes())
        assert copy.read_bytes() == graph
        second = load_campplus(copy, "cpu", TOLERANCES)
        assert second is not first
        assert not torch.equal(second.model.dense_weight, first.model.dense_weight)
        assert load_campplus(copy, "cpu", TOLERANCES) is second

    def test_weights_that_a_sleeping_engine_dropped_are_read_anew(self, copy: Path, builds: list[str]) -> None:
        first = load_campplus(copy, "cpu", TOLERANCES)
        expected = first.model.dense_weight.clone()
        for value in first.model.buffers():
            value.zero_()
        second = load_campplus(copy, "cpu", TOLERANCES)
        assert second is not first
        assert torch.equal(second.model.dense_weight, expected)

    def test_a_model_is_freed_with_its_last_user(self, copy: Path, builds: list[str]) -> None:
        first = load_campplus(copy, "cpu", TOLERANCES)
        weight = weakref.ref(first.model.dense_weight)
        del first
        gc.collect()
        assert weight() is None
        assert isinstance(load_campplus(copy, "cpu", TOLERANCES), Campplus)

    def test_a_model_that_fails_the_gate_is_never_handed_out(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def perturbed(path: str, device: Any) -> Campplus:
            made = build_campplus(path, device)
            made.model.dense_weight.mul_(1.01)
            return made

        monkeypatch.setattr(campplus, "build_campplus", perturbed)
        for _ in range(2):
            with pytest.raises(CampplusParityError):
                load_campplus(copy, "cpu", TOLERANCES)
        monkeypatch.setattr(campplus, "build_campplus", build_campplus)
        assert isinstance(load_campplus(copy, "cpu", TOLERANCES), Campplus)

    def test_the_gate_holds_the_tolerance_that_is_handed_in(self, copy: Path) -> None:
        with pytest.raises(CampplusParityError, match="relative <= 1e-12"):
            load_campplus(copy, "cpu", DeviceTolerances(Tolerance(1e-12)))
