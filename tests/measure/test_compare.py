# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch

from omni_speech_accel.measure import compare as module
from omni_speech_accel.measure.compare import compare
from omni_speech_accel.tolerance import EXACT, Tolerance


def test_equal_tensors_are_equal_to_the_bit() -> None:
    value = torch.randn(3, 5)
    found = compare("x", value, value.clone())
    assert found.ok
    assert (found.max_abs, found.relative, found.cosine, found.differing) == (0.0, 0.0, 1.0, 0)


def test_one_bit_is_a_difference() -> None:
    stock = torch.ones(4)
    ours = stock.clone()
    ours[2] = torch.nextafter(ours[2], torch.tensor(2.0))
    found = compare("x", stock, ours)
    assert not found.ok
    assert found.differing == 1
    assert found.tolerance == "bit-exact"


def test_tokens_that_differ_are_counted() -> None:
    found = compare("tokens", torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 9, 3, 9]]))
    assert (found.ok, found.differing, found.entries, found.max_abs) == (False, 2, 4, 7.0)


def test_relative_is_the_l2_norm_of_the_difference_over_stocks() -> None:
    stock, ours = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    found = compare("x", stock, ours, Tolerance(0.1))
    assert found.relative == pytest.approx(0.1)
    assert found.max_abs == pytest.approx(0.5)
    assert found.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert not compare("x", stock, ours, Tolerance(0.0999)).ok


def test_both_bounds_of_a_tolerance_must_hold() -> None:
    stock, ours = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.1])
    assert compare("x", stock, ours, Tolerance(0.2, 0.99)).ok
    assert not compare("x", stock, ours, Tolerance(0.2, 0.999)).ok


@pytest.mark.parametrize(
    "ours",
    [
        torch.ones(2, dtype=torch.float64),
        torch.ones(1, 2),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, device="meta"),
    ],
)
def test_another_dtype_shape_or_device_is_a_difference(ours: torch.Tensor) -> None:
    found = compare("x", torch.ones(2), ours, Tolerance(1.0))
    assert not found.ok
    assert "stock's is" in found.problem


def test_nan_counts_only_where_stock_has_none() -> None:
    stock = torch.tensor([float("nan"), 1.0])
    assert compare("x", stock, stock.clone(), EXACT).ok
    found = compare("x", torch.tensor([0.0, 1.0]), stock, Tolerance(1e9))
    assert not found.ok
    assert "not finite" in found.problem


def test_minus_infinity_in_the_same_places_is_equal() -> None:
    stock = torch.tensor([float("-inf"), 1.0])
    assert compare("logits", stock, stock.clone()).ok
    assert not compare("logits", stock, torch.tensor([1.0, float("-inf")]), Tolerance(1e9)).ok


def test_equal_infinities_do_not_hide_another_difference() -> None:
    stock = torch.tensor([float("-inf"), 3.0, 4.0])
    ours = torch.tensor([float("-inf"), 3.0, 4.5])
    assert not compare("logits", stock, ours).ok
    assert compare("logits", stock, ours, Tolerance(1.0)).relative == pytest.approx(0.1)


def test_a_large_tensor_is_compared_in_pieces_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    stock = torch.randn(1000, generator=generator)
    ours = stock + 1e-3 * torch.randn(1000, generator=generator)
    whole = compare("x", stock, ours, Tolerance(1.0))
    monkeypatch.setattr(module, "_PIECE", 7)
    pieces = compare("x", stock, ours, Tolerance(1.0))
    assert (pieces.differing, pieces.max_abs) == (whole.differing, whole.max_abs)
    assert pieces.relative == pytest.approx(whole.relative, rel=1e-12)
    assert pieces.cosine == pytest.approx(whole.cosine, rel=1e-12)
    ours[999] = float("nan")
    assert "not finite" in compare("x", stock, ours, Tolerance(1e9)).problem
    ours[999], ours[0] = stock[999], float("inf")
    assert "not finite" in compare("x", stock, ours, Tolerance(1e9)).problem
