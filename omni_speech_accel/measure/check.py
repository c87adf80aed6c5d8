# SPDX-License-Identifier: Apache-2.0
"""How one item is held against stock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_speech_accel.measure.workbench import Outcome, Workbench


@dataclass(frozen=True)
class Check:
    """How one item is verified.

    Args:
        run: Makes the comparison on a workbench, given the item and this row.
        beside: Items that are on in both arms, since this one acts on what they put there.
        phases: The bench phases that the item can change; empty where the speech stage's work does not show it.
        acted: Names of counter events of which one must be above zero, or the item did nothing; empty: any event.
    """

    run: Callable[[Workbench, str, Check], Outcome]
    beside: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    acted: tuple[str, ...] = ()


def block_of(*items: str) -> dict[str, bool]:
    """A settings block with exactly ``items`` on, on an unverified host too: whether they are right there is asked."""
    from omni_speech_accel.plugin.settings import ALLOW_UNVERIFIED
    from omni_speech_accel.plugin.table import PATCHES

    return {**{patch.key: patch.key in items for patch in PATCHES}, ALLOW_UNVERIFIED: True}
