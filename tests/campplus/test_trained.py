# SPDX-License-Identifier: Apache-2.0
"""Trained weights, in every form that an exporter gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omni_speech_accel.campplus import parity as campplus_parity
from omni_speech_accel.campplus.model import CampplusNet, CampplusParityError, build_campplus, load_campplus
from omni_speech_accel.campplus.parity import check_parity
from omni_speech_accel.campplus.synthetic_fbank import speech_like_fbank
from tests.campplus.conftest import RELATIVE, SHORT, TOLERANCES, embed, relative, session_of
from tests.fixtures_trained import EXPORTS


@pytest.fixture(scope="module")
def network(trained: dict[str, Path]) -> CampplusNet:
    return build_campplus(trained["folded-13"]).model


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_the_gate_passes_with_one_thread_and_with_two(trained: dict[str, Path], threads: int) -> None:
    """A bound of 1e-5 passed or failed this very file by the thread count."""
    report = check_parity(build_campplus(trained["folded-13"]).model, trained["folded-13"], TOLERANCES)
    assert report.worst.relative_error < RELATIVE / 4


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export_is_read_and_passes_the_gate(trained: dict[str, Path], name: str) -> None:
    path = trained[name]
    assert check_parity(build_campplus(path).model, path, TOLERANCES, (97, 345)).altered == ()


@pytest.mark.parametrize("name", ["unfolded-13", "unnamed", "dynamo-18", "slim"])
def test_exports_of_one_network_give_one_network(trained: dict[str, Path], network: CampplusNet, name: str) -> None:
    feat = speech_like_fbank(345)[None]
    assert relative(embed(build_campplus(trained[name]).model, feat), embed(network, feat)) < RELATIVE


@pytest.mark.parametrize("frames", [3, 7, 9, 15, 29])
def test_a_reference_of_a_fraction_of_a_second_is_within_its_own_bound(
    trained: dict[str, Path], network: CampplusNet, frames: int
) -> None:
    shipped = session_of(trained["folded-13"])
    for seed in range(4):
        feat = speech_like_fbank(frames, seed)[None]
        assert relative(embed(network, feat), shipped(feat)) < SHORT.relative


def test_one_per_cent_on_any_weight_is_out_of_tolerance(trained: dict[str, Path]) -> None:
    """By the embeddings alone, but for upper clamps: few channels have one. Those the comparison of tensors holds."""
    made = build_campplus(trained["folded-13"]).model
    feats = [speech_like_fbank(frames)[None] for frames in (97, 345)]
    expected = [embed(made, feat) for feat in feats]
    unseen = []
    for name, tensor in made.named_buffers():
        original = tensor.clone()
        tensor.mul_(1.01)
        if not any(relative(embed(made, feat), e) > RELATIVE for feat, e in zip(feats, expected, strict=True)):
            unseen.append(name)
        tensor.copy_(original)
    assert [name for name in unseen if not name.endswith(".high")] == []


@pytest.mark.parametrize("name", ["blocks.1.11.mask1", "blocks.2.3.bottleneck.high", "blocks.0.0.bottleneck.high"])
def test_one_per_cent_on_the_least_influential_tensors_is_refused(trained: dict[str, Path], name: str) -> None:
    made = build_campplus(trained["folded-13"]).model
    made.get_buffer(name).mul_(1.01)
    with pytest.raises(CampplusParityError, match=name.replace(".", r"\.")):
        check_parity(made, trained["folded-13"], TOLERANCES, (97,))


def test_the_least_influential_weight_is_refused_by_the_embeddings_alone(
    trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campplus_parity, "altered_tensors", lambda model, path: ())
    made = build_campplus(trained["folded-13"]).model
    made.get_buffer("blocks.1.11.mask1").mul_(1.01)
    with pytest.raises(CampplusParityError, match=r"relative L2 error \d\.\d+e-04"):
        check_parity(made, trained["folded-13"], TOLERANCES)


def test_it_loads_as_a_stage_loads_it(trained: dict[str, Path]) -> None:
    first = load_campplus(trained["unfolded-13"], "cpu", TOLERANCES)
    assert load_campplus(trained["unfolded-13"], "cpu", TOLERANCES) is first
