# SPDX-License-Identifier: Apache-2.0
"""How far one tensor is from another, and whether an item's stated tolerance allows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_speech_accel.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    import torch

# Entries compared at a time: 128 MiB of float64.
_PIECE = 1 << 24


@dataclass(frozen=True)
class Difference:
    """One comparison with stock. ``differing`` counts unequal entries; of integer tensors they are tokens."""

    what: str
    ok: bool
    max_abs: float
    relative: float
    cosine: float
    differing: int
    entries: int
    tolerance: str
    problem: str = ""


def _mismatch(what: str, problem: str, entries: int, tolerance: Tolerance) -> Difference:
    return Difference(what, False, math.inf, math.inf, 0.0, entries, entries, str(tolerance), problem)


def _sums(stock: torch.Tensor, ours: torch.Tensor) -> tuple[int, float, float, float, float, float]:
    """Unequal entries, largest gap, and the squared norms of gap and both sides and their product, in float64.

    Piece by piece, where the tensors are: one attention cache is half a GiB, and four float64 copies of it on the host
    took seconds per stream.
    """
    import torch

    # Ascend computes no float64.
    target = torch.device("cpu") if stock.device.type == "npu" else stock.device
    totals = [0.0] * 6
    for first, second in zip(
        torch.split(stock.reshape(-1), _PIECE), torch.split(ours.reshape(-1), _PIECE), strict=True
    ):
        first, second = first.to(target, torch.float64), second.to(target, torch.float64)
        # NaN where stock has NaN is equal; anywhere else it is a difference of any size.
        same = (first == second) | (first.isnan() & second.isnan())
        nothing = torch.zeros_like(first)
        gap = torch.where(same, nothing, second - first)
        # Equal infinities (censored logits) would drown every norm.
        endless = same & ~first.isfinite()
        first, second = torch.where(endless, nothing, first), torch.where(endless, nothing, second)
        norms = gap.square().sum(), first.square().sum(), second.square().sum(), first @ second
        found = torch.stack([(~same).sum().to(torch.float64), gap.abs().max(), *norms]).tolist()
        largest = max(totals[1], found[1]) if found[1] == found[1] else math.nan
        totals = [total + value for total, value in zip(totals, found, strict=True)]
        totals[1] = largest
    return int(totals[0]), totals[1], totals[2], totals[3], totals[4], totals[5]


def compare(what: str, stock: torch.Tensor, ours: torch.Tensor, tolerance: Tolerance = EXACT) -> Difference:
    """Compare values, and before them dtype, shape and device: a consumer downstream sees those too."""
    entries = stock.numel()
    for name in ("dtype", "shape", "device"):
        expected, found = getattr(stock, name), getattr(ours, name)
        if expected != found:
            return _mismatch(what, f"{name} is {found}, stock's is {expected}", entries, tolerance)
    differing, largest, gap, first, second, product = _sums(stock.detach(), ours.detach())
    if differing == 0:
        return Difference(what, True, 0.0, 0.0, 1.0, 0, entries, str(tolerance))
    if not math.isfinite(largest) or not math.isfinite(gap):
        return _mismatch(what, "not finite where stock is", entries, tolerance)
    relative = math.sqrt(gap / first) if first > 0.0 else math.inf
    norms = math.sqrt(first) * math.sqrt(second)
    cosine = product / norms if norms > 0.0 else 0.0
    ok = tolerance.relative > 0.0 and tolerance.allows(relative, cosine)
    return Difference(what, ok, largest, relative, cosine, differing, entries, str(tolerance))
