# SPDX-License-Identifier: Apache-2.0
"""The reports of the command line as tables for reading. The same reports are JSON for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from omni_speech_accel.cli.status import ItemStatus, Status
    from omni_speech_accel.measure.bench import ArmReport, BenchReport
    from omni_speech_accel.measure.verify import ItemResult, VerifyReport

_STYLES = {
    "on": "green",
    "available": "green",
    "passed": "green",
    "off": "dim",
    "not applied": "yellow",
    "not run": "yellow",
    "failed": "bold red",
    "error": "bold red",
    "warning": "yellow",
    "hint": "dim",
}


_GAPS = 6
"""Columns of a terminal between the four columns of the items' table."""
_REASON = 14
"""Columns of a terminal below which its reasons could not be read."""


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))


def _facts(console: Console, rows: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)


def _filter(value: str | None) -> str:
    if value is None:
        return "unset: every plugin loads"
    return value or "set and empty: no plugin loads"


def _items_table(items: Sequence[ItemStatus], width: int) -> Table:
    """The items with the words of their states whole on any width; their names fold where the reasons need the room."""
    rows = []
    for item in items:
        fit = "" if item.state == "not applied" else "verified" if item.verified else "unverified"
        rows.append((item.key, item.state, fit, item.reason or item.summary))
    heads = ("item", "state", "fit", "why not / what it does")
    longest = [max(len(word) for cell in column for word in cell.split()) for column in zip(heads, *rows, strict=True)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    spare = width - sum(longest[1:3]) - _GAPS
    if spare >= longest[0] + _REASON:
        table.add_column(heads[0], no_wrap=True)
        for number in (1, 2):
            table.add_column(heads[number], min_width=longest[number])
    else:
        table.add_column(heads[0], width=max(1, spare // 2), overflow="fold")
        for number in (1, 2):
            table.add_column(heads[number], width=longest[number])
    table.add_column(heads[3], overflow="fold")
    for key, state, fit, reason in rows:
        table.add_row(key, _styled(state), fit, reason)
    return table


def print_status(status: Status, console: Console | None = None) -> None:
    """Facts, the items, and what to mind."""
    console = console or Console()
    engines = ", ".join(f"{name} {version}" for name, version in status.engines.items())
    rows = [
        ("omni-speech-accel", status.version),
        ("host", f"vllm-omni {status.host or 'not installed'}" + (f" ({engines})" if engines else "")),
        ("", status.stack),
        ("platform", f"{status.platform.name} ({status.platform.source})"),
        ("VLLM_PLUGINS", f"{_filter(status.plugin.filter)}; a filter that keeps all:"),
    ]
    _facts(console, rows)
    # Not folded: it is there to be copied.
    console.print(f"VLLM_PLUGINS={status.plugin.recommended}", soft_wrap=True, highlight=False)
    rows = []
    if status.deploy is not None:
        rows += [("deploy", status.deploy.path), ("", f"pipeline {status.deploy.pipeline or 'not named'}")]
        rows += [("block", place) for place in status.deploy.blocks]
    _facts(console, rows)
    console.print()
    console.print(_items_table(status.items, console.width))
    if status.notes:
        console.print()
    for note in status.notes:
        # Not folded: some hold a value to be copied.
        console.print(Text.assemble((f"{note.level}: ", _STYLES[note.level]), note.text), soft_wrap=True)


def _detail(result: ItemResult) -> str:
    if result.reason:
        return result.reason
    worst = result.worst
    if worst is None:
        return ""
    if worst.differing == 0:
        return f"{result.comparisons} comparisons, all equal"
    return (
        f"{result.comparisons} comparisons; worst {worst.what}: relative {worst.relative:.2g}, "
        f"max abs {worst.max_abs:.2g}, cosine {worst.cosine:.9f} ({worst.tolerance})"
    )


def print_verify(report: VerifyReport, console: Console | None = None) -> None:
    """One line per item, and the verdict."""
    console = console or Console()
    _facts(
        console,
        [
            ("host", report.host),
            ("platform", report.platform),
            ("model", report.model),
            ("stage", report.profile),
        ],
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(("item", "result", "seconds", "against stock")):
        table.add_column(title, no_wrap=not number, overflow="fold")
    for result in report.results:
        table.add_row(result.item, _styled(result.status), f"{result.seconds:.1f}", _detail(result))
    console.print()
    console.print(table)
    for result in report.results:
        for note in result.notes:
            console.print(f"{result.item}: {note}", style="dim", highlight=False)
    passed = sum(result.status == "passed" for result in report.results)
    verdict = f"{passed} of {len(report.results)} items passed"
    if report.ok:
        console.print(f"\n{verdict}; nothing failed.", style="green", highlight=False)
    else:
        console.print(f"\n{verdict}; failed: {', '.join(report.failed)}", style="bold red", highlight=False)


_PHASES = {
    "prompt_features": "prompt features of one new reference",
    "first_chunk": "first chunk of every stream, all references new",
    "steady_chunk": "a later chunk of every stream",
}


def _items_on(arm: ArmReport) -> str:
    return "no block" if arm.block is None else ", ".join(arm.on) or "none"


def _print_measured(console: Console, title: str | None, heads: list[str], rows: list[list[str]], words: int) -> None:
    """A table whose numbers stand whole on any width: the columns of words fold, the first and those from ``words``."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for number, head in enumerate(heads):
        if 0 < number < words:
            longest = max(len(text) for text in [*head.split(), *(row[number] for row in rows)])
            table.add_column(head, justify="right", min_width=longest)
        else:
            table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def print_bench(report: BenchReport, console: Console | None = None) -> None:
    """One table per phase: milliseconds and the ratio to the baseline of the same run."""
    console = console or Console()
    workload = report.workload
    _facts(
        console,
        [
            ("host", report.host),
            ("device", f"{report.device} ({report.platform}), torch {report.torch}, {report.threads} threads"),
            ("stage", report.profile),
            (
                "work",
                f"{workload.streams} streams of {workload.chunks} chunks, {workload.repeats} measured passes, "
                f"{report.seconds:.0f} s in all",
            ),
        ],
    )
    for phase, title in _PHASES.items():
        rows = [row for row in report.summaries if row.phase == phase]
        if not rows:
            continue
        cells = []
        for row in rows:
            own = [f"{row.median_ms:.1f}", f"{row.min_ms:.1f}", f"{row.max_ms:.1f}"]
            ratio = "?" if row.speedup is None else f"{row.speedup:.2f}x"
            against = ["", ""] if row.arm == report.baseline else [f"{row.baseline_ms:.1f}", ratio]
            cells.append([row.arm, *own, *against, str(row.count)])
        heads = ["arm", "median ms", "min", "max", f"{report.baseline} ms", "faster", "calls"]
        _print_measured(console, title, heads, cells, words=len(heads))
    console.print(
        f"\n{report.baseline} ms: its median in the passes taken in turns with the arm; faster: that over the arm's.",
        style="dim",
        highlight=False,
    )
    cells = []
    refused: dict[str, str] = {}
    for arm in report.arms:
        ratio = "" if arm.audio_ratio is None else f"{arm.audio_ratio:.4f}"
        refused |= arm.not_applied
        cells.append([arm.name, f"{arm.audio_seconds:.1f}", ratio, f"{arm.realtime:.2f}", _items_on(arm)])
    heads = ["arm", "audio s", f"of {report.baseline}", "audio s per s", "items on"]
    _print_measured(console, None, heads, cells, words=4)
    for name, reason in refused.items():
        console.print(f"{name}: not applied: {reason}", style="dim", highlight=False)
    for name, reason in report.idle.items():
        console.print(f"{name}: left out: {reason}", style="dim", highlight=False)
    if report.unmeasured:
        console.print(f"\nStopped before these were measured: {', '.join(report.unmeasured)}", style="bold red")
    if not report.comparable:
        console.print("\nThe arms made different amounts of audio: their times are not comparable.", style="bold red")
