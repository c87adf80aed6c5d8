# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import Tensor

from omni_speech_accel.campplus import model as campplus
from omni_speech_accel.campplus import parity as campplus_parity
from omni_speech_accel.campplus.model import (
    Campplus,
    CampplusFormatError,
    CampplusNet,
    CampplusParityError,
    build_campplus,
    check_parity,
    load_campplus,
    measure_parity,
)
from omni_speech_accel.campplus.onnx_weights import module_path, parse_onnx, read_campplus_weights
from omni_speech_accel.campplus.parity import FULL_PRECISION, PARITY_LENGTHS
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank

RELATIVE = FULL_PRECISION.max_relative_error


@pytest.fixture(scope="module")
def onnx_path(small_checkpoint: Path) -> Path:
    return small_checkpoint / "assets" / "token2wav" / "campplus.onnx"


@pytest.fixture(scope="module")
def net(onnx_path: Path) -> CampplusNet:
    return build_campplus(onnx_path).model


Reference = Callable[[np.ndarray], Tensor]


def session_of(path: Path) -> Reference:
    """The file on onnxruntime, as stock runs it: ``[B, T, 80]`` to ``[B, 192]``."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), sess_options=options, providers=["CPUExecutionProvider"])
    return lambda feat: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: feat})[0])


@pytest.fixture(scope="module")
def shipped(onnx_path: Path) -> Reference:
    return session_of(onnx_path)


def embed(net: CampplusNet, feat: np.ndarray) -> Tensor:
    with torch.inference_mode():
        return net(torch.from_numpy(feat))


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


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


@pytest.fixture
def edited(onnx_path: Path, tmp_path: Path) -> Callable[[Callable[[Any], None]], Path]:
    """Writes a copy of the shipped file after an edit of its parsed model."""

    def edit(change: Callable[[Any], None]) -> Path:
        model = onnx.load(str(onnx_path))
        change(model)
        path = tmp_path / "campplus.onnx"
        onnx.save(model, str(path))
        return path

    return edit


def node_at(model: Any, path: str, operator: str = "Conv") -> Any:
    (node,) = (n for n in model.graph.node if n.op_type == operator and module_path(n.name) == path)
    return node


def constant(model: Any, name: str) -> tuple[np.ndarray, Any]:
    """A tensor of the graph and the message that holds it, wherever the exporter put it."""
    sources = {node.output[0]: node for node in model.graph.node}
    while name in sources and sources[name].op_type == "Identity":
        name = sources[name].input[0]
    for holder in model.graph.initializer:
        if holder.name == name:
            return numpy_helper.to_array(holder).copy(), holder
    holder = sources[name].attribute[0].t
    return numpy_helper.to_array(holder).copy(), holder


class TestReading:
    def test_scopes_that_the_exporter_doubles_are_merged(self) -> None:
        assert module_path("/head/layer1/layer1.0/conv1/Conv") == "head.layer1.0.conv1"
        assert module_path("/head/layer2/layer2.0/shortcut/shortcut.0/Conv") == "head.layer2.0.shortcut.0"
        assert module_path("/xvector/block1/tdnnd12/cam_layer/linear1/Conv_1") == (
            "xvector.block1.tdnnd12.cam_layer.linear1"
        )

    def test_a_batchnorm_that_the_exporter_did_not_fold_is_folded_here(self, edited: Any) -> None:
        rng = np.random.default_rng(3)

        def unfold(model: Any) -> None:
            for path, norm, channels in (
                ("head.conv1", "/head/bn1", 32),
                ("head.layer1.0.shortcut.0", "/head/layer1/layer1.0/shortcut/shortcut.1", 32),
                ("xvector.block2.tdnnd3.linear1", "/xvector/block2/tdnnd3/nonlinear2/batchnorm", 128),
            ):
                conv = node_at(model, path)
                names = [f"{norm}.{role}" for role in ("weight", "bias", "mean", "var")]
                values = rng.uniform(0.5, 1.5, (4, channels)).astype(np.float32)
                model.graph.initializer.extend(map(numpy_helper.from_array, values, names))
                out, inner = conv.output[0], conv.output[0] + "_raw"
                conv.output[0] = inner
                new = helper.make_node(
                    "BatchNormalization", [inner, *names], [out], f"{norm}/BatchNormalization", epsilon=1e-3
                )
                model.graph.node.insert(list(model.graph.node).index(conv) + 1, new)

        path = edited(unfold)
        feat = speech_like_fbank(250)[None]
        assert relative(embed(build_campplus(path).model, feat), session_of(path)(feat)) < RELATIVE

    def test_negative_and_zero_batchnorm_scales_are_exact(self, edited: Any) -> None:
        def flip(model: Any) -> None:
            for path in ("xvector.block1.tdnnd2.nonlinear1.batchnorm", "xvector.transit2.nonlinear.batchnorm"):
                node = node_at(model, path, "BatchNormalization")
                scale, holder = constant(model, node.input[1])
                shift, shift_holder = constant(model, node.input[2])
                scale[::3] *= -1.0
                scale[1::7] = 0.0
                shift[:] = np.linspace(-1, 1, len(shift))
                holder.CopyFrom(numpy_helper.from_array(scale, holder.name))
                shift_holder.CopyFrom(numpy_helper.from_array(shift, shift_holder.name))

        path = edited(flip)
        feat = speech_like_fbank(250)[None]
        got = embed(build_campplus(path).model, feat)
        assert relative(got, session_of(path)(feat)) < RELATIVE

    def test_a_tensor_behind_identity_nodes_is_found(self, edited: Any, net: CampplusNet) -> None:
        def share(model: Any) -> None:
            name = "xvector.dense.linear.weight"
            (holder,) = (i for i in model.graph.initializer if i.name == name)
            holder.name = "shared"
            model.graph.node.insert(0, helper.make_node("Identity", ["shared"], ["once"]))
            model.graph.node.insert(1, helper.make_node("Identity", ["once"], [name]))

        made = build_campplus(edited(share)).model
        assert torch.equal(made.dense_weight, net.dense_weight)

    def test_a_missing_layer_is_named(self, edited: Any) -> None:
        def drop(model: Any) -> None:
            model.graph.node.remove(node_at(model, "xvector.block3.tdnnd16.cam_layer.linear2"))

        with pytest.raises(CampplusFormatError, match=r"no Conv node for xvector\.block3\.tdnnd16\.cam_layer\.linear2"):
            build_campplus(edited(drop))

    def test_a_missing_tensor_is_named(self, edited: Any) -> None:
        def drop(model: Any) -> None:
            node = node_at(model, "xvector.transit1.nonlinear.batchnorm", "BatchNormalization")
            node.input[3] = "nowhere"

        with pytest.raises(
            CampplusFormatError, match=r"xvector\.transit1\.nonlinear\.batchnorm\.running_mean: .*found nothing"
        ):
            build_campplus(edited(drop))

    def test_a_layer_without_the_bias_that_folding_leaves_is_named(self, edited: Any) -> None:
        def drop(model: Any) -> None:
            del node_at(model, "head.layer2.1.conv2").input[2:]

        with pytest.raises(CampplusFormatError, match=r"head\.layer2\.1\.conv2: neither a bias nor a BatchNorm"):
            build_campplus(edited(drop))

    def test_another_width_is_named_with_both_shapes(self, edited: Any) -> None:
        def widen(model: Any) -> None:
            weight, holder = constant(model, node_at(model, "xvector.dense.linear").input[1])
            holder.CopyFrom(numpy_helper.from_array(np.repeat(weight, 2, axis=0), holder.name))

        with pytest.raises(CampplusFormatError, match=r"dense\.linear\.weight: expected .*192.* found shape \(384"):
            build_campplus(edited(widen))

    def test_another_dilation_is_named(self, edited: Any) -> None:
        def spread(model: Any) -> None:
            node = node_at(model, "xvector.block2.tdnnd1.cam_layer.linear_local")
            (attribute,) = (a for a in node.attribute if a.name == "dilations")
            attribute.ints[0] = 3

        with pytest.raises(CampplusFormatError, match=r"linear_local: dilations \[3\], expected \[2\]"):
            build_campplus(edited(spread))

    def test_a_weight_that_no_known_layer_owns_is_named(self, edited: Any) -> None:
        def add(model: Any) -> None:
            model.graph.initializer.append(numpy_helper.from_array(np.ones(192, np.float32), "extra"))
            model.graph.node[-1].output[0] = "inner"
            model.graph.node.append(helper.make_node("Mul", ["inner", "extra"], ["output"], "/scale/Mul"))

        with pytest.raises(CampplusFormatError, match=r"unknown Mul node '/scale/Mul'"):
            build_campplus(edited(add))

    def test_a_file_of_another_kind_is_an_error_of_this_module(self, tmp_path: Path) -> None:
        path = tmp_path / "campplus.onnx"
        for content in (b"", b"no protobuf \xff\xff\xff", os.urandom(4096)):
            path.write_bytes(content)
            with pytest.raises(CampplusFormatError, match=r"not an ONNX model|not a known CAM"):
                build_campplus(path)

    def test_no_file_is_file_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            build_campplus(tmp_path / "campplus.onnx")


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
        report = check_parity(net, onnx_path)
        assert tuple(row.frames for row in report.lengths) == PARITY_LENGTHS
        assert report.worst.relative_error < RELATIVE / 5
        assert report.altered == ()

    def test_covers_short_odd_and_beyond_a_segment(self) -> None:
        after_stride = [-(-frames // 2) for frames in PARITY_LENGTHS]
        assert min(after_stride) < 100
        assert 100 in after_stride
        assert any(frames % 2 for frames in PARITY_LENGTHS)
        assert any(frames > 100 and 0 < frames % 100 < 5 for frames in after_stride)

    @pytest.mark.parametrize("name", PERTURBED)
    def test_one_per_cent_on_one_tensor_moves_the_embedding_out_of_tolerance(self, net: CampplusNet, name: str) -> None:
        feat = speech_like_fbank(345)[None]
        expected = embed(net, feat)
        tensor = net.get_buffer(name)
        original = tensor.clone()
        tensor.mul_(1.01)
        try:
            error = relative(embed(net, feat), expected)
        finally:
            tensor.copy_(original)
        assert error > 1.5 * RELATIVE

    def test_a_scaled_tensor_is_refused_by_its_embeddings_alone(
        self, onnx_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(campplus_parity, "altered_tensors", lambda model, path: ())
        made = build_campplus(onnx_path).model
        made.get_buffer("blocks.2.15.mask1").mul_(1.01)
        with pytest.raises(CampplusParityError, match=r"at \d+ frames: relative L2 error \d\.\d+e-0\d"):
            check_parity(made, onnx_path, (97, 345))

    @pytest.mark.parametrize("name", ["conv1.weight", "blocks.1.7.mask1", "blocks.0.3.bottleneck.low", "dense_weight"])
    def test_one_per_cent_on_one_channel_is_refused_by_name(self, onnx_path: Path, name: str) -> None:
        made = build_campplus(onnx_path).model
        made.get_buffer(name)[5].mul_(1.01)
        with pytest.raises(CampplusParityError, match=name.replace(".", r"\.")) as caught:
            check_parity(made, onnx_path, (97,))
        assert caught.value.report.altered == (name,)

    def test_an_output_that_is_not_finite_is_refused(self, net: CampplusNet, onnx_path: Path) -> None:
        class Broken(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("anchor", torch.zeros(1))

            def forward(self, feat: Tensor) -> Tensor:
                return torch.full((1, 192), torch.nan) if feat.shape[1] == 200 else net(feat)

        with pytest.raises(CampplusParityError, match="at 200 frames") as caught:
            check_parity(Broken(), onnx_path, (97, 200, 345))
        assert not caught.value.report.passed

    def test_a_device_of_less_precision_does_not_lower_the_bar_for_the_weights(
        self, onnx_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = build_campplus(onnx_path).model
        made.get_buffer("blocks.2.15.mask1").mul_(1.01)
        elsewhere = torch.device("meta")
        monkeypatch.setattr(
            campplus_parity, "_device_of", lambda model: elsewhere if model is made else torch.device("cpu")
        )
        assert campplus_parity.tolerance_on(elsewhere).max_relative_error > RELATIVE
        with pytest.raises(CampplusParityError) as caught:
            check_parity(made, onnx_path, (97,))
        assert caught.value.report.tolerance is FULL_PRECISION

    def test_measures_another_torch_model_too(self, onnx_path: Path) -> None:
        from omni_speech_accel.synthetic.speaker import build_speaker

        assert measure_parity(build_speaker(seed=0), onnx_path, (97, 345)).passed
        assert not measure_parity(build_speaker(seed=1), onnx_path, (97,)).passed


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
        monkeypatch.setattr(campplus, "check_parity", lambda model, path: None)
        return built

    def test_threads_share_one_model_built_once(self, copy: Path, builds: list[str]) -> None:
        gate = threading.Barrier(8)

        def load(_: int) -> Campplus:
            gate.wait()
            return load_campplus(copy, "cpu")

        with ThreadPoolExecutor(8) as pool:
            models = set(pool.map(load, range(8)))
        assert len(models) == 1
        assert builds == [str(copy)]

    def test_a_relative_path_and_a_device_object_name_the_same_model(
        self, copy: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = load_campplus(copy, "cpu")
        monkeypatch.chdir(copy.parent)
        assert load_campplus("campplus.onnx", torch.device("cpu")) is first
        assert len(builds) == 1

    def test_two_devices_do_not_share(self, copy: Path, builds: list[str]) -> None:
        assert load_campplus(copy, "cpu") is not load_campplus(copy, "meta")
        assert len(builds) == 2

    def test_a_replaced_file_is_read_anew(self, copy: Path, builds: list[str]) -> None:
        first = load_campplus(copy, "cpu")
        stat = copy.stat()
        os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
        second = load_campplus(copy, "cpu")
        assert second is not first
        assert load_campplus(copy, "cpu") is second
        assert len(builds) == 2

    def test_a_model_that_fails_the_gate_is_never_handed_out(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def perturbed(path: str, device: Any) -> Campplus:
            made = build_campplus(path, device)
            made.model.dense_weight.mul_(1.01)
            return made

        monkeypatch.setattr(campplus, "build_campplus", perturbed)
        for _ in range(2):
            with pytest.raises(CampplusParityError):
                load_campplus(copy, "cpu")
        monkeypatch.setattr(campplus, "build_campplus", build_campplus)
        assert isinstance(load_campplus(copy, "cpu"), Campplus)
