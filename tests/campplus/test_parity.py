# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from omni_speech_accel.campplus import parity as campplus_parity
from omni_speech_accel.campplus.model import CampplusNet, CampplusParityError, build_campplus
from omni_speech_accel.campplus.parity import PARITY_LENGTHS, check_parity, measure_parity
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank
from tests.campplus.conftest import RANDOM_RELATIVE, RELATIVE, TOLERANCES, embed, relative

# One of every kind of tensor, from the first and the last places that hold it.
PERTURBED = [
    "conv1.weight",
    "conv1.bias",
    "head_blocks.0.shortcut.weight",
    "head_blocks.3.conv2.weight",
    "conv2.bias",
    "tdnn_weight",
    "tdnn_bias",
    "blocks.0.0.bottleneck.low",
    "blocks.0.0.bottleneck.weight",
    "blocks.0.0.taps",
    "blocks.0.0.mask1",
    "blocks.0.0.mask2",
    "blocks.1.23.taps",
    "blocks.2.15.bottleneck.low",
    "blocks.2.15.bottleneck.weight",
    "blocks.2.15.taps",
    "blocks.2.15.mask1",
    "blocks.2.15.mask2",
    "transits.2.weight",
    "transits.2.low",
    "dense_weight",
    "dense_bias",
]


class TestParityGate:
    def test_passes_the_shipped_file_with_room_to_spare(self, net: CampplusNet, onnx_path: Path) -> None:
        report = check_parity(net, onnx_path, TOLERANCES)
        assert tuple(row.frames for row in report.lengths) == PARITY_LENGTHS
        assert report.worst.relative_error < RELATIVE / 20
        assert report.altered == ()

    def test_covers_short_odd_and_beyond_a_segment(self) -> None:
        after_stride = [-(-frames // 2) for frames in PARITY_LENGTHS]
        assert min(after_stride) < 100
        assert 100 in after_stride
        assert any(frames % 2 for frames in PARITY_LENGTHS)
        assert any(frames > 100 and 0 < frames % 100 < 5 for frames in after_stride)

    @pytest.mark.parametrize("name", PERTURBED)
    def test_one_per_cent_on_one_tensor_of_random_weights_shows(self, net: CampplusNet, name: str) -> None:
        feat = speech_like_fbank(345)[None]
        expected = embed(net, feat)
        tensor = net.get_buffer(name)
        original = tensor.clone()
        tensor.mul_(1.01)
        try:
            error = relative(embed(net, feat), expected)
        finally:
            tensor.copy_(original)
        assert error > 1.5 * RANDOM_RELATIVE

    def test_a_scaled_tensor_is_refused_by_its_embeddings_alone(
        self, onnx_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(campplus_parity, "altered_tensors", lambda model, path: ())
        made = build_campplus(onnx_path).model
        made.get_buffer("blocks.2.15.mask1").mul_(1.1)
        with pytest.raises(CampplusParityError, match=r"at \d+ frames: relative L2 error \d\.\d+e-0\d"):
            check_parity(made, onnx_path, TOLERANCES, (97, 345))

    @pytest.mark.parametrize("name", ["conv1.weight", "blocks.1.7.mask1", "blocks.0.3.bottleneck.low", "dense_weight"])
    def test_one_per_cent_on_one_channel_is_refused_by_name(self, onnx_path: Path, name: str) -> None:
        made = build_campplus(onnx_path).model
        made.get_buffer(name)[5].mul_(1.01)
        with pytest.raises(CampplusParityError, match=name.replace(".", r"\.")) as caught:
            check_parity(made, onnx_path, TOLERANCES, (97,))
        assert caught.value.report.altered == (name,)

    def test_an_output_that_is_not_finite_is_refused(self, net: CampplusNet, onnx_path: Path) -> None:
        class Broken(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("anchor", torch.zeros(1))

            def forward(self, feat: Tensor) -> Tensor:
                return torch.full((1, 192), torch.nan) if feat.shape[1] == 200 else net(feat)

        with pytest.raises(CampplusParityError, match="at 200 frames") as caught:
            check_parity(Broken(), onnx_path, TOLERANCES, (97, 200, 345))
        assert not caught.value.report.passed

    def test_a_device_of_less_precision_does_not_lower_the_bar_for_the_weights(
        self, onnx_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = build_campplus(onnx_path).model
        made.get_buffer("blocks.2.15.mask1").mul_(1.01)
        elsewhere = SimpleNamespace(type="npu")
        monkeypatch.setattr(
            campplus_parity, "_device_of", lambda model: elsewhere if model is made else torch.device("cpu")
        )
        with pytest.raises(CampplusParityError) as caught:
            check_parity(made, onnx_path, TOLERANCES, (97,))
        assert caught.value.report.tolerance == TOLERANCES.full

    def test_measures_another_torch_model_too(self, onnx_path: Path) -> None:
        from omni_speech_accel.synthetic.speaker import build_speaker

        assert measure_parity(build_speaker(seed=0), onnx_path, TOLERANCES, (97, 345)).passed
        assert not measure_parity(build_speaker(seed=1), onnx_path, TOLERANCES, (97,)).passed
