# SPDX-License-Identifier: Apache-2.0
"""What the checks of one `verify` run share: the model, the references, and stock's answers to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omni_speech_accel.measure.compare import Difference
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.plugin.session import StageSession

_T = TypeVar("_T")


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Args:
        differences: Every comparison with stock.
        refused: Why the item took itself out of the stage while loading, else ``""``.
        host_native: The host is the reason: it does the work itself, or refuses the deploy.
        acted: The item's code ran on this input.
        idle: Why the item has nothing to do under this stage's execution policy, else ``""``.
        counters: The item's counters in the stage.
        notes: How a tolerance was found, and the like.
    """

    differences: tuple[Difference, ...] = ()
    refused: str = ""
    host_native: bool = False
    acted: bool = True
    idle: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Workbench:
    """Inputs of a run, and what stock answers to them, so that checks of one kind ask it once.

    Args:
        model: A MiniCPM-o speech model directory.
        platform: ``cuda``, ``npu`` or ``cpu``.
        profile: The stage's other settings.
        references: (what it is, path) of the reference files.
        progress: Called with a line on what is being done.
    """

    model: Path
    platform: str
    profile: StageProfile
    references: tuple[tuple[str, Path], ...] = ()
    progress: Callable[[str], None] = lambda line: None
    _kept: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """``make()``, kept under ``key``."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: _T = self._kept[key]
        return kept


def refusal(session: StageSession, item: str) -> tuple[str, bool]:
    """Why ``item`` does not act in ``session`` (``""``: it does), and whether the host does its work."""
    if session.on(item):
        return "", False
    reason = session.not_applied.get(item, "it is off")
    return reason, reason.startswith("the host")


def acted(counters: Mapping[str, float], events: tuple[str, ...]) -> bool:
    """Whether the counters show that an item ran: one of ``events``, or any event where none is named."""
    names = events or tuple(name for name in counters if not name.endswith("_seconds"))
    return any(counters.get(name, 0) > 0 for name in names)
