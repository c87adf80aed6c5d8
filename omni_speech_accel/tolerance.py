# SPDX-License-Identifier: Apache-2.0
"""How far an item may be from stock, as data: the patch table states it; gate, `verify`, tests and docs read it.

A device class decides what float32 arithmetic can meet: CPU and CUDA convolve in full float32 where asked to; Ascend
convolves in HF32 (ten mantissa bits) unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """What a comparison allows. ``relative``: L2 norm of the difference over that of stock; both bounds must hold."""

    relative: float = 0.0
    cosine: float | None = None

    def allows(self, relative: float, cosine: float) -> bool:
        """Whether a difference of this size is within both bounds; a NaN is not."""
        return relative <= self.relative and (self.cosine is None or cosine >= self.cosine)

    def __str__(self) -> str:
        if self.relative == 0.0:
            return "bit-exact"
        text = f"relative <= {self.relative:.3g}"
        return text if self.cosine is None else f"{text}, cosine >= {self.cosine}"


EXACT = Tolerance()


@dataclass(frozen=True)
class DeviceTolerances:
    """One tolerance per device class. ``npu``: where its arithmetic meets another than the ``full`` one."""

    full: Tolerance = EXACT
    npu: Tolerance | None = None

    def on(self, device_type: str) -> Tolerance:
        """The tolerance on a device of this type (``cuda``, ``npu``, ``cpu``)."""
        return self.npu if self.npu is not None and device_type == "npu" else self.full

    def __str__(self) -> str:
        return str(self.full) if self.npu is None else f"{self.full}; on NPU {self.npu}"
