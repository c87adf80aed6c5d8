# SPDX-License-Identifier: Apache-2.0
"""`bench` and `ab`: the speech stage's work, arm against arm, in one process and one run.

Every pass brings references that no pass before had, so that features and setup
are cold each time, as they are for traffic with more voices than the caches hold.
Both arms get the same references and codec tokens in a pass, and each pass checks
that each stream used the reference that it was given.
"""

from __future__ import annotations

import json
import platform as python_platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_speech_accel import __version__
from omni_speech_accel.errors import RunError, Unavailable
from omni_speech_accel.host import source as host
from omni_speech_accel.measure.abba import Row, Summary, Turn, audio_ratio, comparable, schedule, summarize
from omni_speech_accel.measure.check import block_of
from omni_speech_accel.measure.checks import CHECKS
from omni_speech_accel.measure.driver import Code2WavDriver
from omni_speech_accel.measure.made_on import command_line, commit, device_name
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.measure.workload import Pass, Workload, plan, write_references
from omni_speech_accel.plugin.fit import fit, idle_reason
from omni_speech_accel.plugin.table import PATCHES, Patch
from omni_speech_accel.synthetic.references import REFERENCE_RATE, speech

if TYPE_CHECKING:
    import torch

__all__ = ["SCHEMA", "STOCK", "Arm", "ArmReport", "BenchReport", "commit", "item_arms", "run"]

SCHEMA = "omni_speech_accel.bench/1"
STOCK = "stock"
ALL = "all"


@dataclass(frozen=True)
class Arm:
    """One configuration.

    Args:
        name: In tables and files.
        block: Its ``omni_speech_accel`` block; ``None`` is no block, stock.
        item: What the arm is there to show; it is left out of a stage where that has nothing to do.
    """

    name: str
    block: Any = None
    item: Patch | None = None


@dataclass(frozen=True)
class ArmReport:
    """What an arm was: its block, the items that were on and those that could not be, counters, and its audio.

    ``realtime``: seconds of audio, over all streams, that a second of the stage's work makes, cold starts included.
    """

    name: str
    block: Any
    on: tuple[str, ...]
    not_applied: Mapping[str, str]
    counters: Mapping[str, Mapping[str, float]]
    audio_seconds: float
    audio_ratio: float | None
    realtime: float
    build_seconds: float


@dataclass(frozen=True)
class BenchReport:
    """One run. ``rows`` are every timed call, warm-ups included; the rest is made from them.

    ``idle``: arms that were left out, since their item has nothing to do in this stage, and why. ``unmeasured``: arms
    that were still to come, or half done, when the run was stopped; it has no row of theirs.
    """

    version: str
    host: str
    engines: Mapping[str, str]
    commit: str | None
    platform: str
    device: str
    torch: str
    threads: int
    command: str
    model: str
    profile: str
    extra: Mapping[str, Any]
    workload: Workload
    baseline: str
    arms: tuple[ArmReport, ...]
    idle: Mapping[str, str]
    unmeasured: tuple[str, ...]
    summaries: tuple[Summary, ...]
    rows: tuple[Row, ...]
    seconds: float
    python: str = field(default_factory=python_platform.python_version)
    schema: str = SCHEMA

    @property
    def ok(self) -> bool:
        """Whether every arm was measured and the ratios mean something."""
        return self.comparable and not self.unmeasured

    @property
    def comparable(self) -> bool:
        """Whether every arm made as much audio as the baseline, so that the ratios mean something."""
        return all(comparable(arm.audio_ratio) for arm in self.arms)

    def as_json(self) -> str:
        """The report as one JSON document."""
        return json.dumps({"comparable": self.comparable, **asdict(self)}, indent=2)


Waveforms = dict[str, "torch.Tensor"]


def item_arms(items: Sequence[str], platform: str) -> list[Arm]:
    """Stock, each item alone, and all of them, for the items whose work the speech stage shows on this device.

    An item that acts on what another puts there is measured with it ("alone" would change nothing).

    Raises:
        Unavailable: A named item cannot be measured here.
    """
    arms = [Arm(STOCK)]
    together: list[str] = []
    for patch in PATCHES:
        if items and patch.key not in items:
            continue
        check = CHECKS[patch.key]
        judged = fit(patch, allow_unverified=True)
        reason = "" if judged.applies else judged.reason
        if not reason and platform not in patch.platforms:
            reason = f"needs {' or '.join(patch.platforms)}"
        if not reason and not check.phases:
            reason = f"acts on {patch.where}, which this bench does not drive"
        if reason and items:
            raise Unavailable(f"{patch.key} cannot be measured here: {reason}")
        if reason:
            continue
        arms.append(Arm(" + ".join((*check.beside, patch.key)), block_of(*check.beside, patch.key), patch))
        together += [key for key in (*check.beside, patch.key) if key not in together]
    if len(arms) == 1:
        raise Unavailable("no item can be measured here")
    return [*arms, Arm(ALL, block_of(*together))] if len(together) > 1 else arms


class _ArmRun:
    """One arm's stage over the run."""

    def __init__(self, arm: Arm, model: Path, profile: StageProfile, seed: int) -> None:
        started = time.perf_counter()
        self.arm = arm
        self.driver = Code2WavDriver(model, profile, block=arm.block, seed=seed)
        self.build_seconds = time.perf_counter() - started
        if arm.block is None and self._on():
            raise RunError(f"{arm.name} has no block, and these items are on all the same: {', '.join(self._on())}")

    def _on(self) -> tuple[str, ...]:
        return tuple(patch.key for patch in PATCHES if self.driver.session.on(patch.key))

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        self.driver.synchronize()
        started = time.perf_counter()
        result = work()
        self.driver.synchronize()
        return time.perf_counter() - started, result

    def codec_tokens(self, waveform: Path) -> list[int]:
        """Speech as the stage's own tokenizer hears it: what the streams will say."""
        import torch

        with torch.inference_mode():
            tokens = self.driver.core._prepare_prompt(str(waveform))[0]
        return [int(token) for token in tokens.reshape(-1).cpu()]

    def features(self, turn: Turn, paths: Sequence[Path]) -> list[Row]:
        """Time the features of references that the stage has not seen."""
        import torch

        rows = []
        for index, path in enumerate(paths):
            with torch.inference_mode():
                seconds, _ = self._timed(lambda path=path: self.driver.core._prepare_prompt(str(path)))  # type: ignore[misc]
            rows.append(Row(turn.pair, turn.arm, turn.number, turn.kind, "prompt_features", index, 1, seconds, 0.0))
        return rows

    def streams(self, turn: Turn, work: Pass, seed: int) -> tuple[list[Row], torch.Tensor]:
        """Time a pass's steps; returns its rows and the first stream's audio.

        Raises:
            ReferenceMixup: A stream used another reference than the one that it was given.
        """
        import torch

        torch.manual_seed(seed)
        rows, audio = [], []
        names = [payload.stream for payload in work.steps[0]]
        for index, step in enumerate(work.steps):
            seconds, outputs = self._timed(lambda step=step: self.driver.step(step))  # type: ignore[misc]
            phase = "first_chunk" if index == 0 else "last_chunk" if index == len(work.steps) - 1 else "steady_chunk"
            made = sum(output.numel() for output in outputs) / REFERENCE_RATE
            rows.append(Row(turn.pair, turn.arm, turn.number, turn.kind, phase, index, len(step), seconds, made))
            audio.append(outputs[0].detach().float().cpu())
            if index == 0:
                self.driver.check_references(names)
        self.driver.finish(names)
        return rows, torch.cat(audio)

    def report(self, rows: Sequence[Row], baseline: str) -> ArmReport:
        """What the arm was, once its rows are complete."""
        session = self.driver.session
        own = [row for row in rows if row.arm == self.arm.name and row.kind == "measured" and row.audio_seconds > 0.0]
        made = sum(row.audio_seconds for row in own)
        return ArmReport(
            name=self.arm.name,
            block=self.arm.block,
            on=self._on(),
            not_applied=session.not_applied,
            counters=session.snapshot(),
            audio_seconds=made,
            audio_ratio=audio_ratio(rows, self.arm.name, baseline),
            realtime=made / sum(row.seconds for row in own),
            build_seconds=round(self.build_seconds, 2),
        )


def _steps(baseline: Arm, others: Sequence[Arm], workload: Workload) -> int:
    """Stages to build and passes to make."""
    return 1 + sum(1 + len(schedule(baseline.name, arm.name, workload.repeats)) for arm in others)


def run(
    arms: Sequence[Arm],
    model: Path,
    profile: StageProfile,
    workload: Workload,
    platform: str,
    scratch: Path,
    *,
    arguments: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[BenchReport, Waveforms]:
    """Measure the baseline in turns with each other arm; also the last pass's audio of the first stream, by arm.

    Two stages are in memory at a time: one takes up to 7 GiB of a device with its graphs, and 3 GB of a CPU's memory.

    Args:
        arms: The first is the baseline; at least one other.
        model: A MiniCPM-o speech model directory.
        profile: The stage's other settings, the same for every arm.
        workload: What each pass does.
        platform: The device type that the host runs on.
        scratch: An empty folder for reference files.
        arguments: The command line, for the record.
        progress: Called with (what is being done, turns done, turns in all).

    Raises:
        ReferenceMixup: A stream used another reference than the one that it was given.
        KeyboardInterrupt: The run was stopped before one arm was done; later, what is done is reported.
    """
    import torch

    started = time.perf_counter()
    baseline, *others = arms
    total = _steps(baseline, others, workload)
    done = 0

    def step(what: str) -> None:
        nonlocal done
        progress(what, done, total)
        done += 1

    step(f"building {baseline.name}")
    stock = _ArmRun(baseline, model, profile, workload.seed)
    idle = {arm.name: reason for arm in others if arm.item and (reason := idle_reason(arm.item, stock.driver.backend))}
    others = [arm for arm in others if arm.name not in idle]
    total = _steps(baseline, others, workload)
    voices = speech()
    tokens = stock.codec_tokens(write_references(scratch, voices[:1], -1)[0])
    rows: list[Row] = []
    reports: list[ArmReport] = []
    waveforms: Waveforms = {}
    first = 0

    def measure(arm: Arm) -> None:
        nonlocal first
        step(f"building {arm.name}")
        candidate = _ArmRun(arm, model, profile, workload.seed)
        runs = {baseline.name: stock, arm.name: candidate}
        work: Pass | None = None
        for turn in schedule(baseline.name, arm.name, workload.repeats, first=first):
            step(f"{arm.name}: {turn.kind} pass of {turn.arm}")
            if work is None or work.number != turn.number:
                work = plan(workload, profile, turn.number, tokens, voices, scratch)
                first = turn.number + 1
            rows.extend(runs[turn.arm].features(turn, work.paths))
            timed, waveforms[turn.arm] = runs[turn.arm].streams(turn, work, workload.seed + turn.number)
            rows.extend(timed)
        reports.append(candidate.report(rows, baseline.name))
        candidate.driver.close()

    try:
        for arm in others:
            measure(arm)
    except KeyboardInterrupt:
        if not reports:
            raise
    measured, left = others[: len(reports)], tuple(arm.name for arm in others[len(reports) :])
    rows = [row for row in rows if row.pair not in left]
    for name in left:
        waveforms.pop(name, None)
    reports.insert(0, stock.report(rows, baseline.name))
    stock.driver.close()
    info = host.host_info()
    report = BenchReport(
        version=__version__,
        host=str(info),
        engines=dict(info.engines),
        commit=commit(),
        platform=platform,
        device=device_name(platform),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        command=command_line(sys.argv[1:] if arguments is None else arguments),
        model=str(model),
        profile=profile.source,
        extra=dict(profile.extra),
        workload=workload,
        baseline=baseline.name,
        arms=tuple(reports),
        idle=idle,
        unmeasured=left,
        summaries=tuple(summarize(rows, [baseline.name, *(arm.name for arm in measured)], baseline.name)),
        rows=tuple(rows),
        seconds=round(time.perf_counter() - started, 1),
    )
    return report, waveforms
