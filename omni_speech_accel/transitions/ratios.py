# SPDX-License-Identifier: Apache-2.0
"""What the runs of two arms say of their speed: their numbers, the ratios with extremes, what to know, the table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_speech_accel.transitions.processes import RunFailed

# Names in the client's result file; whether more is better. `audio_duration` is there to show that both arms spoke
# equally much: a ratio of throughputs means nothing otherwise.
METRICS: dict[str, bool] = {
    "audio_throughput": True,
    "request_throughput": True,
    "mean_audio_rtf": False,
    "p95_audio_rtf": False,
    "median_audio_ttfp_ms": False,
    "p95_audio_ttfp_ms": False,
    "mean_e2el_ms": False,
    "total_audio_duration_s": True,
}
AUDIO_METRIC = "total_audio_duration_s"
# Above this the arms did not do the same work.
AUDIO_MISMATCH = 0.01


def read_result(path: Path, requests: int) -> dict[str, Any]:
    """The client's result file, if all its requests succeeded. Raises `RunFailed`."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFailed(f"the client left no readable {path}: {error}") from error
    # The client ends with 0 even if requests failed.
    if result.get("completed") != requests:
        raise RunFailed(f"{result.get('completed')} of {requests} requests succeeded; see {path}")
    absent = [name for name in METRICS if not isinstance(result.get(name), int | float)]
    if absent:
        raise RunFailed(f"{path} has no {', '.join(absent)}: another version of the client?")
    if result[AUDIO_METRIC] <= 0:
        raise RunFailed(f"no audio came back; see {path}")
    return result


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per concurrency and metric: median, minimum, maximum of either arm, and B over A with its extremes."""
    found = []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        for metric, more_is_better in METRICS.items():
            a, b = (
                [row[metric] for row in rows if row["arm"] == arm and row["concurrency"] == concurrency] for arm in "AB"
            )
            found.append(
                {
                    "concurrency": concurrency,
                    "metric": metric,
                    "more_is_better": more_is_better,
                    "runs": len(a),
                    "a_median": statistics.median(a),
                    "a_min": min(a),
                    "a_max": max(a),
                    "b_median": statistics.median(b),
                    "b_min": min(b),
                    "b_max": max(b),
                    "ratio": statistics.median(b) / statistics.median(a),
                    # The extremes that single runs allow: if 1 lies between, the runs do not tell the arms apart.
                    "ratio_min": min(b) / max(a),
                    "ratio_max": max(b) / min(a),
                }
            )
    return found


def notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the ratios."""
    found = []
    unclear = []
    for row in summary["ratios"]:
        if row["metric"] == AUDIO_METRIC and abs(row["ratio"] - 1) > AUDIO_MISMATCH:
            found.append(
                f"C{row['concurrency']}: B spoke {row['ratio']:.3f} times as much audio as A; the throughput and "
                "latency ratios include that"
            )
        if row["metric"] == "audio_throughput" and row["ratio_min"] <= 1 <= row["ratio_max"]:
            unclear.append(f"C{row['concurrency']}")
    if unclear:
        places = ", ".join(unclear)
        found.append(f"{places}: single runs of the arms overlap in audio_throughput; this shows no difference")
    if summary["outputs_match"] is None:
        found.append("the outputs of the arms were not compared")
    elif not summary["outputs_match"]:
        found.append("the outputs were not shown to match: see transitions.log of the first visits and transitions-B/")
    return found


def table(summary: dict[str, Any]) -> str:
    """The ratios for reading."""
    lines = [f"A: {summary['arms']['A']}    B: {summary['arms']['B']}    order {summary['order']}", ""]
    lines.append(
        f"{'':>4} {'':<23} {'A median (min - max)':>30} {'B median (min - max)':>30} {'B / A (min - max)':>24}"
    )
    for row in summary["ratios"]:
        cells = [
            f"{row[f'{arm}_median']:.3f} ({row[f'{arm}_min']:.3f} - {row[f'{arm}_max']:.3f})" for arm in ("a", "b")
        ]
        ratio = f"{row['ratio']:.3f} ({row['ratio_min']:.3f} - {row['ratio_max']:.3f})"
        name = f"{row['metric']}{'+' if row['more_is_better'] else '-'}"
        lines.append(f"{'C' + str(row['concurrency']):>4} {name:<23} {cells[0]:>30} {cells[1]:>30} {ratio:>24}")
    lines += ["", "+ more is better, - less is better", *(f"note: {note}" for note in summary["notes"])]
    if summary["outputs_match"]:
        lines.append("The outputs match in every transition.")
    return "\n".join(lines)
