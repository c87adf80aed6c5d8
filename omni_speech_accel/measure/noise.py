# SPDX-License-Identifier: Apache-2.0
"""Random draws that do not depend on the batch they are made in, so that audio can be compared across batch sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWS = {torch.rand, torch.randn}
_DRAWS_LIKE = {torch.rand_like, torch.randn_like}


class RowIndependentNoise(TorchFunctionMode):
    """Every draw in this context is one fixed value instead.

    The vocoder draws the phase and noise of its source per batch row: eight rows in one call and eight calls of one row
    see other numbers from the same seed, and their audio differs for that alone. A graph that is captured in this
    context keeps the fixed value.
    """

    VALUE = 0.25

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS_LIKE:
            return torch.full_like(args[0], self.VALUE)
        if func in _DRAWS:
            options = {name: value for name, value in kwargs.items() if name in ("dtype", "device")}
            sizes = args or (kwargs["size"],)
            shape = sizes if isinstance(sizes[0], int) else sizes[0]
            return torch.full(tuple(shape), self.VALUE, **options)
        return func(*args, **kwargs)
