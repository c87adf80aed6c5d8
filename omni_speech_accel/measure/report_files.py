# SPDX-License-Identifier: Apache-2.0
"""A bench report on disk: JSON, CSV of every call, a plot, and a WAV per arm."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from omni_speech_accel.measure.abba import PHASES, Row
from omni_speech_accel.synthetic.references import REFERENCE_RATE

if TYPE_CHECKING:
    from omni_speech_accel.measure.bench import BenchReport, Waveforms

BENCH_JSON = "bench.json"
PLOT_HINT = "no plot: matplotlib is not installed; pip install 'omni-speech-accel[bench]'"

_TITLES = {
    "prompt_features": "prompt features,\none new reference",
    "first_chunk": "first chunk,\nall references new",
    "steady_chunk": "steady chunk",
}


def write_csv(path: Path, rows: tuple[Row, ...]) -> None:
    """Every timed call, warm-ups included, one a line."""
    names = [field.name for field in fields(Row)]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def write_plot(path: Path, report: BenchReport) -> bool:
    """Median per arm and phase, with least and most as whiskers; ``False`` where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    phases = [phase for phase in PHASES if any(row.phase == phase for row in report.summaries)]
    arms = [arm.name for arm in report.arms]
    figure, axes = pyplot.subplots(
        1, len(phases), figsize=(1.5 + 4.0 * len(phases), 1.6 + 0.42 * len(arms)), sharey=True, squeeze=False
    )
    for axis, phase in zip(axes[0], phases, strict=True):
        found = {row.arm: row for row in report.summaries if row.phase == phase}
        for position, name in enumerate(arms):
            row = found[name]
            whiskers = [[row.median_ms - row.min_ms], [row.max_ms - row.median_ms]]
            colour = "#888888" if name == report.baseline else "#2a7f62"
            axis.barh(position, row.median_ms, xerr=whiskers, color=colour, height=0.62, capsize=3)
            if name != report.baseline:
                axis.vlines(row.baseline_ms, position - 0.42, position + 0.42, color="#888888", linestyles="dashed")
            ratio = "" if row.speedup is None or name == report.baseline else f"  {row.speedup:.2f}x"
            beside = max(row.max_ms, row.baseline_ms)
            axis.text(beside, position, f"  {row.median_ms:.1f} ms{ratio}", va="center", fontsize=8)
        axis.set_title(_TITLES[phase], fontsize=10)
        axis.set_xlabel(f"ms, median with min and max\ndashed: {report.baseline} in the same passes", fontsize=8)
        axis.margins(x=0.35)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yticks(range(len(arms)), arms)
    axes[0][0].invert_yaxis()
    figure.suptitle(f"{report.host} on {report.device}, {report.workload.streams} streams", fontsize=10)
    figure.text(0.01, 0.01, f"{report.profile}; commit {report.commit or 'not in git'}", fontsize=7, color="#666666")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _file_name(arm: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in arm.replace(" ", ""))


def _remove_earlier(directory: Path) -> None:
    """Remove what an earlier run left: its plot, or the WAV of an arm that is no more, would pass for this run's."""
    try:
        arms = [arm["name"] for arm in json.loads((directory / BENCH_JSON).read_text(encoding="utf-8"))["arms"]]
    except (OSError, ValueError, LookupError, TypeError):
        return
    for name in ("bench.csv", "bench.png", *(f"{_file_name(arm)}.wav" for arm in arms)):
        (directory / name).unlink(missing_ok=True)


def write_all(directory: Path, report: BenchReport, waveforms: Waveforms) -> list[str]:
    """Write everything in place of an earlier run's; returns the names of the files, and the hint for a plot."""
    import soundfile

    directory.mkdir(parents=True, exist_ok=True)
    _remove_earlier(directory)
    (directory / BENCH_JSON).write_text(report.as_json() + "\n", encoding="utf-8")
    write_csv(directory / "bench.csv", report.rows)
    names = [BENCH_JSON, "bench.csv"]
    names.append("bench.png" if write_plot(directory / "bench.png", report) else PLOT_HINT)
    for arm, waveform in waveforms.items():
        name = f"{_file_name(arm)}.wav"
        soundfile.write(directory / name, waveform.clamp(-1.0, 1.0).numpy(), REFERENCE_RATE)
        names.append(name)
    return names
