# SPDX-License-Identifier: Apache-2.0
"""A report as a table to read, as JSON, and as raw rows and WAVs on disk."""

from __future__ import annotations

import csv
import json
import math
import wave
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omni_speech_accel.transitions.check import Report, StreamResult, TransitionResult
from omni_speech_accel.transitions.client import StreamRecord
from omni_speech_accel.transitions.compare import DEFAULT_SAMPLE_RATE, Distance, Fault, Status

_COLOURS = {Status.OK: "green", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow"}


def to_json(report: Report) -> dict[str, Any]:
    """The whole report as JSON-ready data; infinite ratios are null."""
    config = report.config
    return {
        "passed": report.passed,
        "status": report.status.value,
        "servers": report.servers,
        "environment": report.environment,
        "tolerance": asdict(config.tolerance),
        "repeat": config.repeat,
        "transitions": [
            {
                "name": result.transition.name,
                "purpose": result.transition.purpose,
                "status": result.status.value,
                "not_exercised": list(result.not_exercised),
                "peak_streams": result.peaks,
                "noise_floor": _distance(_worst(stream.verdict.noise for stream in result.streams)),
                "distance": _distance(_worst(stream.verdict.distance for stream in result.streams)),
                "streams": [_row(result, stream) for stream in result.streams],
            }
            for result in report.transitions
        ],
        "not_run": list(report.not_run),
    }


def print_report(report: Report, console: Console) -> None:
    """Print one line a transition, then every problem with the transition and the stream it belongs to."""
    ours, theirs = report.servers["candidate"], report.servers["baseline"]
    recorded = " (recorded)" if "recorded" in theirs else ""
    table = Table(title=f"transitions: {escape(ours['url'])} against {escape(theirs['url'])}{recorded}")
    for heading in ("transition", "ok", "at once", "audio s", "noise", "distance", "result"):
        table.add_column(heading, justify="left" if heading in ("transition", "result") else "right")
    for result in report.transitions:
        good = sum(stream.verdict.status is Status.OK for stream in result.streams)
        noise = _worst(stream.verdict.noise for stream in result.streams)
        distance = _worst(stream.verdict.distance for stream in result.streams)
        table.add_row(
            result.transition.name,
            f"{good}/{len(result.streams)}",
            str(min(result.peaks.values())),
            f"{sum(_seconds(stream.candidate) for stream in result.streams):.2f}",
            _short(noise),
            _short(distance),
            f"[{_COLOURS[result.status]}]{_label(result)}[/]",
        )
    console.print(table)
    for line in problems(report):
        console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"[{_COLOURS[report.status]}]{summary(report)}[/]", soft_wrap=True)


def problems(report: Report) -> list[str]:
    """Every stream that is not ok and every transition that was not seen to happen or not run, one line each."""
    found = [line for result in report.transitions for line in problems_of(result)]
    return found + [f"{name}: not run" for name in report.not_run]


def problems_of(result: TransitionResult) -> list[str]:
    """What is wrong with one transition, one line each; empty if nothing is."""
    lines = []
    for stream in result.streams:
        if stream.verdict.status is not Status.OK:
            run = f" (run {stream.run + 1})" if stream.run else ""
            where = f"{result.transition.name}, stream {stream.spec.index} ({stream.spec.role}){run}"
            lines.append(f"{where}: {stream.verdict.fault.value}: {stream.verdict.message}")
    return lines + [f"{result.transition.name}: not exercised: {text}" for text in result.not_exercised]


def summary(report: Report) -> str:
    """The outcome in one or two sentences, with what to do next where that is known."""
    count = len(report.transitions) + len(report.not_run)
    if report.passed:
        return f"All {count} transitions match."
    bad = [result.transition.name for result in report.transitions if result.status is Status.FAIL]
    open_ = [result.transition.name for result in report.transitions if result.status is Status.INCONCLUSIVE]
    parts = []
    if bad:
        parts.append(f"{len(bad)} of {count} transitions fail: {', '.join(bad)}.")
    if open_:
        parts.append(f"{len(open_)} of {count} transitions show nothing either way: {', '.join(open_)}.")
    if report.not_run:
        parts.append(f"The check was stopped: {len(report.not_run)} of {count} transitions were not run.")
    faults = {stream.verdict.fault for result in report.transitions for stream in result.streams}
    if Fault.NOISE in faults:
        parts.append(
            "The baseline does not repeat itself: make it deterministic (seed, greedy sampling), state a tolerance "
            "(--pcm-tolerance, --min-snr), or compare completeness and duration alone (--no-pcm)."
        )
    if any(result.not_exercised for result in report.transitions):
        parts.append(
            "Where streams did not overlap, use longer inputs or fewer streams than the server's max_num_seqs."
        )
    return " ".join(parts)


def save(report: Report, folder: Path) -> None:
    """Write ``report.json``, ``rows.csv`` (one row a stream and run) and a WAV pair for every stream that is not ok."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(to_json(report), indent=2) + "\n", encoding="utf-8")
    rows = [_row(result, stream) for result in report.transitions for stream in result.streams]
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(
            {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()} for row in rows
        )
    for result in report.transitions:
        for stream in result.streams:
            if stream.verdict.status is Status.OK:
                continue
            name = f"{result.transition.name}-stream{stream.spec.index}-run{stream.run + 1}"
            _save_wav(folder / "wav" / f"{name}-candidate.wav", stream.candidate)
            for number, record in enumerate(stream.baselines, 1):
                _save_wav(folder / "wav" / f"{name}-baseline{number}.wav", record)


def _row(result: TransitionResult, stream: StreamResult) -> dict[str, Any]:
    verdict, candidate = stream.verdict, stream.candidate
    distance, noise = verdict.distance, verdict.noise
    first = distance.first if distance else None
    rate = (candidate.sample_rate or DEFAULT_SAMPLE_RATE) * (candidate.channels or 1)
    return {
        "transition": result.transition.name,
        "run": stream.run + 1,
        "stream": stream.spec.index,
        "role": stream.spec.role,
        "seed": stream.spec.seed,
        "input_chars": len(stream.spec.text),
        "status": verdict.status.value,
        "fault": verdict.fault.value,
        "message": verdict.message,
        "ending": candidate.ending.value,
        "sample_rate": candidate.sample_rate,
        "channels": candidate.channels,
        "samples": len(candidate.pcm) // 2,
        "baseline_samples": [len(record.pcm) // 2 for record in stream.baselines],
        "max_lsb": distance.max_lsb if distance else None,
        "snr_db": _finite(distance.snr_db) if distance else None,
        "first_difference_s": None if first is None else first / rate,
        "noise_max_lsb": noise.max_lsb if noise else None,
        "noise_snr_db": _finite(noise.snr_db) if noise else None,
        "sent_s": round(candidate.sent_at, 4),
        "first_audio_s": None if candidate.first_audio_at is None else round(candidate.first_audio_at, 4),
        "ended_s": round(candidate.ended_at, 4),
        "reads": len(candidate.audio_at),
    }


def _label(result: TransitionResult) -> str:
    if result.status is Status.OK:
        return "ok"
    faults = list(dict.fromkeys(s.verdict.fault.value for s in result.streams if s.verdict.fault is not Fault.NONE))
    return ", ".join(faults + (["not exercised"] if result.not_exercised else []))


def _worst(distances: Iterable[Distance | None]) -> Distance | None:
    return max((item for item in distances if item), key=lambda item: (abs(item.length), item.max_lsb), default=None)


def _short(distance: Distance | None) -> str:
    if distance is None:
        return "-"
    if distance.max_lsb == 0:
        return f"{distance.length:+d} samples" if distance.length else "equal"
    return f"{distance.max_lsb} LSB, {distance.snr_db:.0f} dB"


def _distance(distance: Distance | None) -> dict[str, Any] | None:
    if distance is None:
        return None
    return {"max_lsb": distance.max_lsb, "snr_db": _finite(distance.snr_db), "length": distance.length}


def _finite(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None


def _seconds(record: StreamRecord) -> float:
    return len(record.pcm) / 2 / ((record.sample_rate or DEFAULT_SAMPLE_RATE) * (record.channels or 1))


def _save_wav(path: Path, record: StreamRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(record.channels or 1)
        file.setsampwidth(2)
        file.setframerate(record.sample_rate or DEFAULT_SAMPLE_RATE)
        file.writeframes(record.pcm[: len(record.pcm) // 2 * 2])
