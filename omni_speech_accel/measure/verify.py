# SPDX-License-Identifier: Apache-2.0
"""`verify`: each item on against stock, on the same input, on the device that is here."""

from __future__ import annotations

import difflib
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omni_speech_accel import __version__
from omni_speech_accel.errors import UsageError, UserError
from omni_speech_accel.host import source as host
from omni_speech_accel.measure.check import Check
from omni_speech_accel.measure.checks import CHECKS
from omni_speech_accel.measure.compare import Difference
from omni_speech_accel.measure.workbench import Outcome, Workbench
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.table import PATCHES, Patch

SCHEMA = "omni_speech_accel.verify/1"

PASSED = "passed"
FAILED = "failed"
NOT_RUN = "not run"
NOT_APPLIED = "not applied"


@dataclass(frozen=True)
class ItemResult:
    """One item's verdict.

    ``status``: ``passed``; ``failed``; ``not run`` (needs another device) or ``not applied`` (the host lacks the place
    for it, or does the work itself). The last two prove nothing, and fail the command where the item was named.
    """

    item: str
    status: str
    reason: str
    parity: str
    asked: bool
    seconds: float = 0.0
    comparisons: int = 0
    worst: Difference | None = None
    differences: tuple[Difference, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether this verdict lets the command succeed."""
        return self.status == PASSED or (not self.asked and self.status != FAILED)


@dataclass(frozen=True)
class VerifyReport:
    """The verdicts of a run and what it ran on."""

    version: str
    host: str
    platform: str
    model: str
    profile: str
    results: tuple[ItemResult, ...]
    seconds: float
    schema: str = SCHEMA

    @property
    def ok(self) -> bool:
        """Whether every item that could be checked, and every item that was named, passed."""
        return all(result.ok for result in self.results)

    @property
    def failed(self) -> tuple[str, ...]:
        """The items that make the command fail."""
        return tuple(result.item for result in self.results if not result.ok)

    def as_json(self, *, every_comparison: bool = False) -> str:
        """The report as one JSON document; a difference that has no number is ``null``.

        Each item has its worst comparison, and all of them with ``every_comparison``.
        """
        document = {"ok": self.ok, "failed": self.failed, **asdict(self)}
        if not every_comparison:
            for result in document["results"]:
                del result["differences"]
        return json.dumps(_finite(document), indent=2)


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def select_items(names: Sequence[str]) -> tuple[Patch, ...]:
    """The rows of ``names`` in table order; all rows where none is named.

    Raises:
        UsageError: A name is not in the table.
    """
    known = [patch.key for patch in PATCHES]
    unknown = [name for name in names if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"unknown item {unknown[0]}; {hint}the items are: {', '.join(known)}")
    return tuple(patch for patch in PATCHES if not names or patch.key in names)


def _worst(differences: Sequence[Difference]) -> Difference | None:
    """A failed comparison before a good one, then the widest."""
    return max(differences, key=lambda one: (not one.ok, one.relative), default=None)


def _judge(outcome: Outcome) -> tuple[str, str]:
    """Status and reason of an outcome."""
    if outcome.refused:
        return (NOT_APPLIED if outcome.host_native else FAILED), f"not applied: {outcome.refused}"
    failed = [one for one in outcome.differences if not one.ok]
    if failed:
        first = _worst(failed)
        assert first is not None
        detail = first.problem or f"relative {first.relative:.3g}, max abs {first.max_abs:.3g}"
        return FAILED, f"{len(failed)} of {len(outcome.differences)} comparisons differ; {first.what}: {detail}"
    if outcome.counters.get("failures"):
        return FAILED, f"{outcome.counters['failures']:.0f} failures counted; the log says which"
    if outcome.idle:
        return NOT_RUN, outcome.idle
    if not outcome.differences or not outcome.acted:
        return FAILED, "the item was on and did not act on this input, so nothing was shown"
    return PASSED, ""


def _run(bench: Workbench, patch: Patch, check: Check, asked: bool) -> ItemResult:
    started = time.perf_counter()

    def result(status: str, reason: str, outcome: Outcome | None = None) -> ItemResult:
        outcome = outcome or Outcome()
        return ItemResult(
            item=patch.key,
            status=status,
            reason=reason,
            parity=patch.against_stock,
            asked=asked,
            seconds=round(time.perf_counter() - started, 2),
            comparisons=len(outcome.differences),
            worst=_worst(outcome.differences),
            differences=outcome.differences,
            counters=dict(outcome.counters),
            notes=outcome.notes,
        )

    judged = fit(patch, allow_unverified=True)
    if not judged.applies:
        return result(NOT_APPLIED, judged.reason)
    if bench.platform not in patch.platforms:
        return result(NOT_RUN, f"needs {' or '.join(patch.platforms)}: not run here ({bench.platform})")
    try:
        outcome = check.run(bench, patch.key, check)
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return result(FAILED, f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})")
    return result(*_judge(outcome), outcome)


def verify(
    bench: Workbench,
    patches: Sequence[Patch],
    *,
    asked: bool,
    finished: Callable[[ItemResult], None] = lambda result: None,
) -> VerifyReport:
    """Check ``patches`` one after the other.

    Args:
        bench: Model, device and references.
        patches: Rows of the table.
        asked: The user named them, so an item that cannot be checked here fails.
        finished: Called with each verdict as it comes.
    """
    started = time.perf_counter()
    results: list[ItemResult] = []
    try:
        for patch in patches:
            results.append(_run(bench, patch, CHECKS[patch.key], asked))
            finished(results[-1])
    except KeyboardInterrupt:
        # What has been shown is worth its minutes, and what has not is no success.
        for patch in patches[len(results) :]:
            results.append(ItemResult(patch.key, FAILED, "stopped before it was checked", patch.against_stock, asked))
    return VerifyReport(
        version=__version__,
        host=str(host.host_info()),
        platform=bench.platform,
        model=str(bench.model),
        profile=bench.profile.source,
        results=tuple(results),
        seconds=round(time.perf_counter() - started, 2),
    )
