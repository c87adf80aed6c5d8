# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from omni_speech_accel.measure.noise import RowIndependentNoise


def draw(rows: int) -> torch.Tensor:
    source = (
        torch.rand(rows, 9)
        + torch.rand((rows, 9))
        + torch.rand(size=(rows, 9))
        + torch.rand(rows, 9, device="cpu", dtype=torch.float32)
    )
    return source + torch.randn_like(source) + torch.rand_like(source)


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    with RowIndependentNoise():
        alone, batch = draw(1), draw(4)
    assert torch.equal(batch, alone.expand(4, -1))


def test_draws_are_random_again_afterwards() -> None:
    with RowIndependentNoise():
        draw(1)
    assert not torch.equal(torch.rand(8), torch.rand(8))


def test_dtype_and_device_are_those_asked_for() -> None:
    with RowIndependentNoise():
        found = torch.randn(2, 3, dtype=torch.float64)
    assert (found.shape, found.dtype) == ((2, 3), torch.float64)
