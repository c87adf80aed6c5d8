# SPDX-License-Identifier: Apache-2.0
"""Named random tensors: one independent stream per (seed, tensor name)."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> FloatArray:
    """Float32 of ``shape``, uniform in 0..1.

    Drawn from the tensor's own stream: a host that adds or reorders tensors leaves all other weights as they were.
    """
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).random(shape, dtype=np.float32)


def normal(seed: int, name: str, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> FloatArray:
    """Normal float32 of ``shape``, from the tensor's own stream."""
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)
    draw *= np.float32(std)
    draw += np.float32(mean)
    return draw


def layer_weight(seed: int, name: str, shape: tuple[int, ...], gain: float = 1.0) -> FloatArray:
    """A weight or bias by the usual rule for its shape.

    Matrices and kernels keep the variance of their input times ``gain`` squared, one-dimensional ``weight`` tensors are
    norm scales near one, biases are small.
    """
    if len(shape) >= 2:
        # uniform, because the draw is four times as fast as a normal one and the tokenizer alone has 124 million
        draw = uniform(seed, name, shape)
        draw -= np.float32(0.5)
        draw *= np.float32(gain * np.sqrt(12.0 / np.prod(shape[1:])))
        return draw
    return normal(seed, name, shape, 0.02, 1.0 if name.endswith("weight") else 0.0)
