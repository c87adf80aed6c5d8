# SPDX-License-Identifier: Apache-2.0
"""The order of a comparison's runs, and the arithmetic on their rows. Knows neither torch nor the host."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PHASES = ("prompt_features", "first_chunk", "steady_chunk")
"""Cold features of one reference; one `forward` with the first chunk of every stream, all references new; one
`forward` with a later chunk of every stream."""

# Arms decode the same codec tokens, so their audio is as long to the sample; a resampled tail may differ by a hop.
AUDIO_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Turn:
    """One pass of one arm. ``kind``: ``warm-up`` and ``discarded`` are not reported; ``measured`` are.

    ``pair``: the arm that the baseline takes turns with. ``number``: the pass, over all pairs, so that no two passes
    share a reference.
    """

    pair: str
    arm: str
    number: int
    kind: str


@dataclass(frozen=True)
class Row:
    """One timed call: ``seconds`` of wall time until the device is idle, and the audio that it made (all streams)."""

    pair: str
    arm: str
    number: int
    kind: str
    phase: str
    index: int
    streams: int
    seconds: float
    audio_seconds: float


@dataclass(frozen=True)
class Summary:
    """One arm's measured calls of one phase, in milliseconds.

    ``speedup``: the baseline's median over this arm's, of the passes that they took in turns; ``None`` for the baseline
    itself, and where the arms' audio differs in length, since the work then differs too. ``low``/``high``: the same of
    the baseline's fastest call against this arm's slowest, and the other way round.
    """

    arm: str
    phase: str
    count: int
    median_ms: float
    min_ms: float
    max_ms: float
    baseline_ms: float
    speedup: float | None
    low: float | None
    high: float | None
    audio_seconds: float


def schedule(baseline: str, arm: str, repeats: int, *, warmups: int = 1, first: int = 0) -> list[Turn]:
    """The passes of two arms in order: warm-ups, one discarded pass each, then ``repeats`` measured ones.

    After the warm-ups each pass runs in the opposite order of the one before (A B B A), so that a machine that grows
    slower or faster weighs on both arms alike.

    Raises:
        ValueError: The arms are one, or there is less than one measured pass.
    """
    if baseline == arm:
        raise ValueError(f"an arm cannot be compared with itself: {arm}")
    if repeats < 1:
        raise ValueError("at least one measured pass is needed")
    kinds = ["warm-up"] * warmups + ["discarded"] + ["measured"] * repeats
    turns = []
    for number, kind in enumerate(kinds):
        forward = kind == "warm-up" or (number - warmups) % 2 == 0
        order = (baseline, arm) if forward else (arm, baseline)
        turns += [Turn(arm, name, first + number, kind) for name in order]
    return turns


def _measured(rows: Sequence[Row], arm: str, pair: str | None, phase: str | None = None) -> list[Row]:
    return [
        row
        for row in rows
        if row.kind == "measured"
        and row.arm == arm
        and (pair is None or row.pair == pair)
        and (phase is None or row.phase == phase)
    ]


def audio_ratio(rows: Sequence[Row], arm: str, baseline: str) -> float | None:
    """The arm's measured audio seconds over the baseline's of the same passes; ``None`` where there is none."""
    if arm == baseline:
        return None
    own, base = (sum(row.audio_seconds for row in _measured(rows, name, arm)) for name in (arm, baseline))
    return own / base if base else None


def comparable(ratio: float | None) -> bool:
    """Whether two arms that made audio in this ratio did the same work."""
    return ratio is None or abs(ratio - 1.0) <= AUDIO_TOLERANCE


def _summary(rows: Sequence[Row], arm: str, baseline: str, phase: str) -> Summary | None:
    own = _measured(rows, arm, None, phase)
    base = [row.seconds for row in _measured(rows, baseline, None if arm == baseline else arm, phase)]
    if not own or not base:
        return None
    seconds = [row.seconds for row in own]
    judged = arm != baseline and comparable(audio_ratio(rows, arm, baseline))
    return Summary(
        arm=arm,
        phase=phase,
        count=len(seconds),
        median_ms=statistics.median(seconds) * 1e3,
        min_ms=min(seconds) * 1e3,
        max_ms=max(seconds) * 1e3,
        baseline_ms=statistics.median(base) * 1e3,
        speedup=statistics.median(base) / statistics.median(seconds) if judged else None,
        low=min(base) / max(seconds) if judged else None,
        high=max(base) / min(seconds) if judged else None,
        audio_seconds=sum(row.audio_seconds for row in own),
    )


def summarize(rows: Sequence[Row], arms: Sequence[str], baseline: str) -> list[Summary]:
    """Median, least and most per arm and phase, and the ratio to ``baseline`` in the passes they took in turns."""
    found = (_summary(rows, arm, baseline, phase) for phase in PHASES for arm in arms)
    return [summary for summary in found if summary is not None]
