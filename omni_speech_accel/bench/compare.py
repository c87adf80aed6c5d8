# SPDX-License-Identifier: Apache-2.0
"""How far one tensor is from another, and whether an item's stated tolerance allows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["EXACT", "Difference", "Tolerance", "compare"]


@dataclass(frozen=True)
class Tolerance:
    """What a comparison allows. ``relative``: L2 norm of the difference over that of stock; both bounds must hold."""

    relative: float = 0.0
    cosine: float | None = None

    def __str__(self) -> str:
        if self.relative == 0.0:
            return "bit-exact"
        text = f"relative <= {self.relative:.3g}"
        return text if self.cosine is None else f"{text}, cosine >= {self.cosine}"


EXACT = Tolerance()


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


def compare(what: str, stock: torch.Tensor, ours: torch.Tensor, tolerance: Tolerance = EXACT) -> Difference:
    """Compare values, and before them dtype, shape and device type: a consumer downstream sees those too."""
    import torch

    for name in ("dtype", "shape", "device"):
        expected, found = getattr(stock, name), getattr(ours, name)
        if expected != found:
            return _mismatch(what, f"{name} is {found}, stock's is {expected}", stock.numel(), tolerance)
    first = stock.detach().to("cpu", torch.float64).reshape(-1)
    second = ours.detach().to("cpu", torch.float64).reshape(-1)
    # NaN where stock has NaN is equal; anywhere else it is a difference of any size.
    same = (first == second) | (first.isnan() & second.isnan())
    differing = int((~same).sum())
    entries = first.numel()
    if differing == 0:
        return Difference(what, True, 0.0, 0.0, 1.0, 0, entries, str(tolerance))
    gap = torch.where(same, torch.zeros_like(first), second - first)
    if not bool(gap.isfinite().all()):
        return _mismatch(what, "not finite where stock is", entries, tolerance)
    norm = float(first.norm())
    relative = float(gap.norm()) / norm if norm > 0.0 else math.inf
    product = norm * float(second.norm())
    cosine = float(first @ second) / product if product > 0.0 else 0.0
    ok = relative <= tolerance.relative and (tolerance.cosine is None or cosine >= tolerance.cosine)
    return Difference(what, ok, float(gap.abs().max()), relative, cosine, differing, entries, str(tolerance))
