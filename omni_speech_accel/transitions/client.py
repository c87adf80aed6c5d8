# SPDX-License-Identifier: Apache-2.0
"""Runs one transition against one server over real HTTP and records what each stream received, and when."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from omni_speech_accel.transitions import CannotCompare
from omni_speech_accel.transitions.plan import Condition, State, StreamSpec, Transition
from omni_speech_accel.transitions.wire import BodyError, WavStripper, body_reader, printable

if TYPE_CHECKING:
    import httpx

MISSING_HTTPX = (
    "omni-speech-accel transitions needs httpx, which is not installed: pip install 'omni-speech-accel[bench]'"
)


class Ending(str, Enum):
    """How a stream came to its end, seen from the client."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    ERROR_IN_BODY = "error inside a 200"
    MALFORMED = "malformed body"
    CUT = "cut stream"
    HTTP_ERROR = "HTTP error"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class RequestOptions:
    """What every request has in common.

    Times are in seconds: `timeout_s` bounds a whole stream, `stall_s` the gap between two reads. `extra_body` is merged
    last, so it wins over everything else; a null in it removes a field.
    """

    model: str | None = None
    response_format: str = "pcm"
    stream_format: str = "sse"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    stall_s: float = 120.0
    api_key: str | None = None


@dataclass
class StreamRecord:
    """What one stream delivered. Times are seconds since the start of the transition; `pcm` is s16le."""

    ending: Ending = Ending.CUT
    detail: str = ""
    status: int | None = None
    pcm: bytes = b""
    sample_rate: int | None = None
    channels: int | None = None
    sent_at: float = 0.0
    audio_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def first_audio_at(self) -> float | None:
        """When the first audio arrived, or None if none did."""
        return self.audio_at[0] if self.audio_at else None


def request_body(spec: StreamSpec, options: RequestOptions) -> dict[str, Any]:
    """The JSON body of one stream's request."""
    body: dict[str, Any] = {"input": spec.text, "response_format": options.response_format, "stream": True}
    if options.stream_format == "audio":
        body["stream_format"] = "audio"
    if options.model:
        body["model"] = options.model
    body["seed"] = spec.seed
    body.update(spec.fields)
    body.update(options.extra_body)
    return {key: value for key, value in body.items() if value is not None}


@contextlib.asynccontextmanager
async def connect(options: RequestOptions) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client without a limit on connections: a pool limit would queue streams and hide the batch shape.

    Raises `CannotCompare` where httpx, an extra, is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise CannotCompare(MISSING_HTTPX) from error
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = httpx.Timeout(options.stall_s, connect=min(10.0, options.stall_s))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    # No proxy from the environment: the check compares two servers, not what stands between.
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers, trust_env=False) as client:
        yield client


async def probe(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """What the server says of itself: ``{"url", "models", "version"}``.

    Raises `CannotCompare` if nobody answers there, the server asks for a key, or what it answers is nested too
    deep to be read.
    """
    import httpx

    found: dict[str, Any] = {"url": url, "models": [], "version": None}
    for path in ("/v1/models", "/version"):
        try:
            response = await client.get(url + path)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError, UnicodeError) as error:
            raise CannotCompare(f"no server answers at {url}: {type(error).__name__}: {error}") from error
        if response.status_code in (401, 403):
            raise CannotCompare(f"{url}{path} answers {response.status_code}: give the server's key with --api-key")
        try:
            answer = response.json()
        except ValueError:
            continue
        except RecursionError as error:
            raise CannotCompare(f"{url}{path} answers with JSON that is nested too deep") from error
        with contextlib.suppress(KeyError, TypeError):
            if path == "/version":
                found["version"] = printable(answer["version"]) if isinstance(answer["version"], str) else None
            else:
                names = [model["id"] for model in answer["data"]]
                found["models"] = [printable(name) for name in names if isinstance(name, str)]
    return found


class _Progress:
    """Who has had audio and who has ended, for the streams that wait for it."""

    def __init__(self, count: int) -> None:
        self._events = {(index, state): asyncio.Event() for index in range(count) for state in State}

    def reached(self, stream: int, state: State) -> None:
        self._events[stream, state].set()

    async def wait(self, conditions: Sequence[Condition]) -> None:
        for condition in conditions:
            await self._events[condition.stream, condition.state].wait()


async def run_transition(
    client: httpx.AsyncClient, url: str, transition: Transition, options: RequestOptions
) -> list[StreamRecord]:
    """Run every stream of `transition` against `url`; one record a stream, in plan order.

    Nothing a server does raises: a failed stream is a record whose `ending` says how it failed.
    """
    progress = _Progress(len(transition.streams))
    start = time.perf_counter()
    streams = [_run_stream(client, url, spec, options, progress, start) for spec in transition.streams]
    return list(await asyncio.gather(*streams))


async def _run_stream(
    client: httpx.AsyncClient, url: str, spec: StreamSpec, options: RequestOptions, progress: _Progress, start: float
) -> StreamRecord:
    record = StreamRecord()
    try:
        await progress.wait(spec.starts_after)
        record.sent_at = time.perf_counter() - start
        receiver = asyncio.create_task(_receive(client, url, spec, options, record, progress, start))
        leaver = asyncio.create_task(_leave(spec, progress, receiver))
        try:
            # wait(), not wait_for(): a receiver cancelled by the plan must be told from one that ran out of time.
            done, _ = await asyncio.wait({receiver}, timeout=options.timeout_s)
        finally:
            leaver.cancel()
            receiver.cancel()
            await asyncio.gather(leaver, receiver, return_exceptions=True)
        if not done:
            record.ending, record.detail = Ending.TIMEOUT, f"not finished after {options.timeout_s:g} s"
        elif receiver.cancelled():
            record.ending = Ending.CANCELLED
        else:
            receiver.result()
    finally:
        record.ended_at = time.perf_counter() - start
        progress.reached(spec.index, State.AUDIO)
        progress.reached(spec.index, State.ENDED)
    return record


async def _leave(spec: StreamSpec, progress: _Progress, receiver: asyncio.Task[None]) -> None:
    if spec.cancelled:
        await progress.wait(spec.cancels_after)
        receiver.cancel()


async def _receive(
    client: httpx.AsyncClient,
    url: str,
    spec: StreamSpec,
    options: RequestOptions,
    record: StreamRecord,
    progress: _Progress,
    start: float,
) -> None:
    import httpx

    request = request_body(spec, options)
    asked = str(request.get("response_format", "pcm"))
    wav = WavStripper() if asked == "wav" else None

    def accept(audio: bytes) -> None:
        samples = wav.feed(audio) if wav else audio
        if samples:
            record.pcm += samples
            record.audio_at.append(time.perf_counter() - start)
            progress.reached(spec.index, State.AUDIO)

    try:
        async with client.stream("POST", f"{url}/v1/audio/speech", json=request) as response:
            record.status = response.status_code
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                record.ending, record.detail = Ending.HTTP_ERROR, f"{response.status_code}: {text[:300]}"
                return
            body = body_reader(response.headers, asked)
            try:
                async for data in response.aiter_bytes():
                    accept(body.feed(data))
                rest, complete = body.finish()
                accept(rest)
            finally:
                record.sample_rate = (wav.sample_rate if wav else None) or body.sample_rate
                record.channels = (wav.channels if wav else None) or body.channels
            record.ending = Ending.COMPLETE if complete else Ending.CUT
            record.detail = "" if complete else "the event stream ended without speech.audio.done"
    except BodyError as error:
        record.ending = Ending.MALFORMED if error.malformed else Ending.ERROR_IN_BODY
        record.detail = str(error)
    except httpx.TimeoutException as error:
        record.ending, record.detail = Ending.TIMEOUT, f"{type(error).__name__}: no data for {options.stall_s:g} s"
    except (httpx.HTTPError, OSError) as error:
        record.ending, record.detail = Ending.CUT, f"the connection broke: {type(error).__name__}: {error}"
