# SPDX-License-Identifier: Apache-2.0
"""Runs the plan on both servers, transition by transition, and gathers the verdicts into one report."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from omni_speech_accel import __version__
from omni_speech_accel.transitions.client import Ending, RequestOptions, StreamRecord, connect, probe, run_transition
from omni_speech_accel.transitions.compare import Status, Tolerance, Verdict, judge_stream
from omni_speech_accel.transitions.plan import State, StreamSpec, Transition
from omni_speech_accel.transitions.recording import Recording, requests_of

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class TransitionsConfig:
    """Everything one check needs.

    `baseline` is a URL, or a `Recording` of a server that ran earlier; the plan must then be the recorded one.
    `baseline_runs` runs of the baseline set the noise floor; `repeat` runs of the candidate must each match.
    A transition that was not seen to happen is tried again up to `attempts` times in all.
    """

    baseline: str | Recording
    candidate: str
    plan: tuple[Transition, ...]
    request: RequestOptions = field(default_factory=RequestOptions)
    tolerance: Tolerance = field(default_factory=Tolerance)
    baseline_runs: int = 2
    repeat: int = 1
    attempts: int = 2
    on_start: Callable[[Transition], None] = lambda transition: None
    on_result: Callable[[TransitionResult], None] = lambda result: None


@dataclass(frozen=True)
class StreamResult:
    """One stream of one candidate run, its verdict, and the records that it rests on."""

    spec: StreamSpec
    run: int
    verdict: Verdict
    baselines: tuple[StreamRecord, ...]
    candidate: StreamRecord


@dataclass(frozen=True)
class TransitionResult:
    """All that is known of one transition.

    `not_exercised` says, per server, what of the intended sequence of batch shapes was not seen; empty when all was.
    """

    transition: Transition
    streams: tuple[StreamResult, ...]
    not_exercised: tuple[str, ...]
    peaks: dict[str, int]

    @property
    def status(self) -> Status:
        """Fail if any stream fails; inconclusive if any is, or if the transition did not happen; else ok."""
        found = {stream.verdict.status for stream in self.streams}
        if Status.FAIL in found:
            return Status.FAIL
        return Status.INCONCLUSIVE if Status.INCONCLUSIVE in found or self.not_exercised else Status.OK


@dataclass(frozen=True)
class Report:
    """The whole check. `passed` is true only if every transition happened on both servers and every stream is ok.

    `not_run` names the transitions that a stopped check did not get to the end of.
    """

    config: TransitionsConfig
    transitions: tuple[TransitionResult, ...]
    servers: dict[str, dict[str, Any]]
    environment: dict[str, Any]
    not_run: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """The worst status of all transitions."""
        found = {result.status for result in self.transitions} | ({Status.INCONCLUSIVE} if self.not_run else set())
        return next((status for status in (Status.FAIL, Status.INCONCLUSIVE) if status in found), Status.OK)

    @property
    def passed(self) -> bool:
        """Whether the candidate was shown to match the baseline in every transition."""
        return self.status is Status.OK


def run_transitions(config: TransitionsConfig) -> Report:
    """Run the check; needs httpx. Ctrl-C ends it early: the report then holds what was compared so far.

    Raises `CannotCompare` if a server does not answer, the baseline is a recording of other requests, or without
    httpx. Nothing else that a server does raises: it becomes a verdict.
    """
    if isinstance(config.baseline, Recording):
        config.baseline.require(config.plan, config.request)
    return asyncio.run(_run(config))


def record_baseline(config: TransitionsConfig) -> tuple[Recording, list[str]]:
    """Run the plan on the baseline alone, for a candidate that cannot run beside it.

    Returns the recording and what is wrong with it, one line each: streams that failed, transitions that did not
    happen. Ctrl-C ends it early: the recording then holds the transitions done so far. Raises as
    `run_transitions` does.
    """
    return asyncio.run(_record(config))


async def _run(config: TransitionsConfig) -> Report:
    started = datetime.now(timezone.utc)
    servers: dict[str, dict[str, Any]] = {"candidate": {"url": config.candidate}}
    if isinstance(config.baseline, Recording):
        servers["baseline"] = _Replayer(config.baseline).server
    else:
        servers["baseline"] = {"url": config.baseline}
    results: list[TransitionResult] = []

    async def compare(client: httpx.AsyncClient) -> None:
        candidate = await _Player.connect(client, config.candidate, config)
        servers["candidate"] = candidate.server
        baseline: _Player | _Replayer
        if isinstance(config.baseline, Recording):
            baseline = _Replayer(config.baseline)
        else:
            baseline = await _Player.connect(client, config.baseline, config)
            servers["baseline"] = baseline.server
        for transition in config.plan:
            config.on_start(transition)
            baselines = await baseline.runs(transition, config.baseline_runs)
            candidates = await candidate.runs(transition, config.repeat)
            results.append(_judge(config, transition, baselines, candidates))
            config.on_result(results[-1])

    async with connect(config.request) as client:
        await _until_stopped(compare(client))
    not_run = tuple(transition.name for transition in config.plan[len(results) :])
    return Report(config, tuple(results), servers, _environment(started), not_run)


async def _record(config: TransitionsConfig) -> tuple[Recording, list[str]]:
    if isinstance(config.baseline, Recording):
        raise TypeError("a recording can only be made of a server")
    started = datetime.now(timezone.utc)
    server: dict[str, Any] = {"url": config.baseline}
    runs: dict[str, list[list[StreamRecord]]] = {}
    wrong: list[str] = []

    async def play(client: httpx.AsyncClient, url: str) -> None:
        player = await _Player.connect(client, url, config)
        server.update(player.server)
        for transition in config.plan:
            config.on_start(transition)
            runs[transition.name] = recorded = await player.runs(transition, config.baseline_runs)
            for records in recorded:
                wrong.extend(f"{transition.name}: not exercised: {text}" for text in missing(transition, records))
                wrong.extend(
                    f"{transition.name}, stream {spec.index} ({spec.role}): {record.ending.value}: {record.detail}"
                    for spec, record in zip(transition.streams, records, strict=True)
                    if not _ended_well(record)
                )

    async with connect(config.request) as client:
        await _until_stopped(play(client, config.baseline))
    done, left = config.plan[: len(runs)], config.plan[len(runs) :]
    wrong.extend(f"{transition.name}: not run" for transition in left)
    requests = requests_of(done, config.request)
    return Recording(server, _environment(started), requests, runs), list(dict.fromkeys(wrong))


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, which the first Ctrl-C cancels quietly; a second one has its usual effect."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def stop() -> None:
        restore()
        task.cancel()

    def restore() -> None:
        with contextlib.suppress(NotImplementedError):
            if loop.remove_signal_handler(signal.SIGINT):
                signal.signal(signal.SIGINT, before)

    # Windows has none; outside the main thread the process's owner decides.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        await asyncio.wait({task})
    finally:
        restore()
        task.cancel()
    if not task.cancelled():
        task.result()


def _environment(started: datetime) -> dict[str, Any]:
    return {
        "started": started.isoformat(),
        "finished": datetime.now(timezone.utc).isoformat(),
        "omni_speech_accel": __version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


@dataclass(frozen=True)
class _Player:
    """Plays transitions on a live server."""

    client: httpx.AsyncClient
    server: dict[str, Any]
    request: RequestOptions
    attempts: int

    @classmethod
    async def connect(cls, client: httpx.AsyncClient, url: str, config: TransitionsConfig) -> _Player:
        server = await probe(client, url)
        request = config.request
        if not request.model and server["models"]:
            request = replace(request, model=str(server["models"][0]))
        return cls(client, server, request, config.attempts)

    async def runs(self, transition: Transition, count: int) -> list[list[StreamRecord]]:
        return [await self._run(transition) for _ in range(count)]

    async def _run(self, transition: Transition) -> list[StreamRecord]:
        # A busy machine may let a stream end before the next could join; that says nothing about the server. A stream
        # that failed does, and is not tried away.
        for attempt in range(1, self.attempts + 1):
            records = await run_transition(self.client, self.server["url"], transition, self.request)
            if attempt == self.attempts or not missing(transition, records) or not all(map(_ended_well, records)):
                break
        return records


@dataclass(frozen=True)
class _Replayer:
    """Gives back what a server said earlier."""

    recording: Recording

    @property
    def server(self) -> dict[str, Any]:
        return self.recording.server | {"recorded": self.recording.environment}

    async def runs(self, transition: Transition, count: int) -> list[list[StreamRecord]]:
        # All of them: more runs only make the noise floor better known.
        return self.recording.runs[transition.name]


def _judge(
    config: TransitionsConfig,
    transition: Transition,
    baselines: list[list[StreamRecord]],
    candidates: list[list[StreamRecord]],
) -> TransitionResult:
    streams = [
        StreamResult(
            spec,
            number,
            judge_stream(spec.index, baselines, records[spec.index], config.tolerance),
            tuple(run[spec.index] for run in baselines),
            records[spec.index],
        )
        for number, records in enumerate(candidates)
        for spec in transition.streams
    ]
    sides = {"baseline": baselines, "candidate": candidates}
    not_exercised = [
        f"{side}: {text}"
        for side, runs in sides.items()
        for text in dict.fromkeys(text for records in runs for text in missing(transition, records))
    ]
    peaks = {side: min(peak_streams(records) for records in runs) for side, runs in sides.items()}
    return TransitionResult(transition, tuple(streams), tuple(not_exercised), peaks)


def _ended_well(record: StreamRecord) -> bool:
    return record.ending in (Ending.COMPLETE, Ending.CANCELLED)


def peak_streams(records: Sequence[StreamRecord]) -> int:
    """The most streams that were being delivered at one moment: from first to last audio, or until the client left."""
    spans = [
        (record.audio_at[0], record.ended_at if record.ending is Ending.CANCELLED else record.audio_at[-1])
        for record in records
        if record.audio_at
    ]
    return max((sum(start <= at <= end for start, end in spans) for at, _ in spans), default=0)


def missing(transition: Transition, records: Sequence[StreamRecord]) -> list[str]:
    """What the transition meant to force and this run did not show, in words; empty if it showed all of it.

    Judged by what the clients saw: how many streamed at one moment, whether a joiner's first audio fell between the
    audio of others, whether others went on after a stream finished early or its client left.
    """
    found = []
    peak = peak_streams(records)
    if peak < transition.peak:
        found.append(f"{peak} of {transition.peak} streams overlapped")
    if not transition.strict:
        return found
    for spec in transition.streams:
        record = records[spec.index]
        others = [other for other in records if other is not record and other.audio_at]
        joined = spec.role == "joiner" or any(condition.state is State.AUDIO for condition in spec.starts_after)
        if joined and record.audio_at:
            first = record.audio_at[0]
            if not any(other.audio_at[0] < record.sent_at and other.audio_at[-1] > first for other in others):
                found.append(f"stream {spec.index} did not join while others were decoding")
        if spec.cancelled and record.ending is not Ending.CANCELLED:
            found.append(f"stream {spec.index} ended before its client left")
        leaves_others = spec.role in ("cancelled", "short")
        if leaves_others and not any(other.audio_at[-1] > record.ended_at for other in others):
            found.append(f"nobody was streaming after stream {spec.index} left")
    return found
