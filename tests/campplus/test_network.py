# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_speech_accel.campplus.model import CampplusNet, build_campplus
from omni_speech_accel.campplus.onnx_graph import parse_onnx
from omni_speech_accel.campplus.onnx_weights import read_campplus_weights
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank
from tests.campplus.conftest import RANDOM_RELATIVE as RELATIVE
from tests.campplus.conftest import Reference, embed, relative


class TestEmbedding:
    @settings(max_examples=8, deadline=None)
    @given(frames=st.integers(20, 800), seed=st.integers(0, 1000))
    def test_equals_onnxruntime_at_any_length(
        self, net: CampplusNet, shipped: Reference, frames: int, seed: int
    ) -> None:
        feat = speech_like_fbank(frames, seed)[None]
        assert relative(embed(net, feat), shipped(feat)) < RELATIVE

    @pytest.mark.parametrize("frames", [3, 4, 5, 9, 199, 200, 201, 202, 399, 400, 401])
    def test_equals_onnxruntime_where_segments_begin_and_end(
        self, net: CampplusNet, shipped: Reference, frames: int
    ) -> None:
        feat = speech_like_fbank(frames)[None]
        assert relative(embed(net, feat), shipped(feat)) < RELATIVE

    def test_equals_the_hosts_own_torch_model(self, net: CampplusNet) -> None:
        from omni_speech_accel.synthetic.speaker import build_speaker

        own = build_speaker(seed=0)
        feat = torch.from_numpy(speech_like_fbank(345)[None])
        with torch.inference_mode():
            assert relative(net(feat), own(feat)) < RELATIVE

    def test_digital_silence_gives_the_shipped_models_finite_embedding(
        self, net: CampplusNet, shipped: Reference
    ) -> None:
        silence = np.zeros((1, 298, 80), dtype=np.float32)
        assert torch.isfinite(shipped(silence)).all()
        assert relative(embed(net, silence), shipped(silence)) < RELATIVE

    @pytest.mark.parametrize("frames", [1, 2])
    def test_too_short_for_a_deviation_is_nan_as_shipped(
        self, net: CampplusNet, shipped: Reference, frames: int
    ) -> None:
        feat = speech_like_fbank(frames)[None] + 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that one frame has no deviation
            assert torch.equal(torch.isnan(embed(net, feat)), torch.isnan(shipped(feat)))

    def test_rows_of_a_batch_do_not_touch(self, net: CampplusNet) -> None:
        rows = [speech_like_fbank(250, seed) for seed in range(3)]
        stacked = embed(net, np.stack(rows))
        assert stacked.shape == (3, 192)
        for row, feat in zip(stacked, rows, strict=True):
            assert relative(row, embed(net, feat[None])[0]) < 5e-6

    def test_padding_a_reference_changes_its_embedding(self, net: CampplusNet) -> None:
        """Why a caller may not bucket lengths by padding: the error dwarfs the tolerance."""
        feat = speech_like_fbank(250)
        padded = np.pad(feat, ((0, 50), (0, 0)))
        assert relative(embed(net, padded[None]), embed(net, feat[None])) > 100 * RELATIVE

    def test_two_voices_differ(self, net: CampplusNet) -> None:
        loud, soft = speech_like_fbank(300, 1) * 1.6, speech_like_fbank(300, 2) * 0.9
        assert float(torch.cosine_similarity(embed(net, loud[None]), embed(net, soft[None]))) < 0.9

    @pytest.mark.parametrize("shape", [(598, 80), (1, 598, 79), (1, 80, 598)])
    def test_another_shape_is_an_error_that_names_it(self, net: CampplusNet, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"\[B, T, 80\]"):
            net(torch.zeros(shape))


class TestExecution:
    def test_float32_under_a_bfloat16_default(self, onnx_path: Path, net: CampplusNet) -> None:
        feat = speech_like_fbank(345)[None]
        expected = embed(net, feat)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            made = build_campplus(onnx_path)
            got = made(torch.from_numpy(feat[0]))
        finally:
            torch.set_default_dtype(before)
        assert {value.dtype for value in made.model.buffers()} == {torch.float32}
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)

    def test_float32_inside_autocast(self, net: CampplusNet) -> None:
        feat = torch.from_numpy(speech_like_fbank(345)[None])
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            got = net(feat)
        assert torch.equal(got, embed(net, feat.numpy()))

    def test_reads_nothing_that_was_not_written(self, net: CampplusNet) -> None:
        feat = speech_like_fbank(345)[None]
        expected = embed(net, feat)
        torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
        try:
            assert torch.isnan(torch.empty(4)).all()
            got = embed(net, feat)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(got, expected)

    def test_needs_no_data_and_no_other_device(self, onnx_path: Path) -> None:
        """On the meta device a read of a value, or a tensor made elsewhere, raises: what a graph capture refuses."""
        abstract = CampplusNet(read_campplus_weights(parse_onnx(onnx_path))).to("meta")
        for batch, frames in ((1, 150), (8, 598)):
            assert abstract(torch.empty(batch, frames, 80, device="meta")).shape == (batch, 192)

    def test_called_as_the_host_calls_its_speaker_model(self, onnx_path: Path, net: CampplusNet) -> None:
        made = build_campplus(onnx_path)
        feat = torch.from_numpy(speech_like_fbank(200))
        got = made(feat)
        assert (got.shape, got.dtype, got.device) == ((1, 192), torch.float32, made.device)
        assert torch.equal(made(feat.to(torch.float64)), got)
        with pytest.raises(ValueError, match=r"\[B, T, 80\]"):
            made(feat[None])
