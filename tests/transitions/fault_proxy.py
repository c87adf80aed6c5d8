# SPDX-License-Identifier: Apache-2.0
"""A loopback proxy in front of a speech server that spoils chosen streams in a chosen way, and passes the rest through.

It works on the events (or raw reads) of real upstream responses, so the same faults can be put in front of a fake and
of a real ``vllm serve --omni``.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from .loopback import Exchange

FAULTS = (
    "truncate",
    "swap",
    "swap-midway",
    "longer",
    "shorter",
    "error-in-200",
    "json-200",
    "cut",
    "end-without-done",
    "stall",
    "pcm",
    "odd-bytes",
    "http-500",
)


@dataclass
class FaultProxy:
    """Spoils the requests whose `seed` is in `seeds` with `fault`, after `after` audio events have passed.

    For the swaps the first two chosen requests exchange what their upstreams send: wholly, or from `after` on.
    """

    upstream: str
    fault: str
    seeds: Collection[int] = ()
    after: int = 1
    spoiled: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.fault in FAULTS
        self._pair: list[asyncio.Queue[bytes | None]] = []
        self._paired: asyncio.Event | None = None

    async def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        timeout = httpx.Timeout(120.0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            if request.method == "GET":
                response = await client.get(self.upstream + request.path)
                await exchange.reply(response.status_code, response.headers.get("content-type", ""), response.content)
                return
            body = json.loads(request.body)
            self.seen.append(body)
            chosen = body.get("seed") in self.seeds
            if chosen and self.fault == "http-500":
                self.spoiled += 1
                return await exchange.reply(500, "application/json", b'{"error": {"message": "injected"}}')
            if chosen and self.fault == "json-200":
                self.spoiled += 1
                return await exchange.reply(200, "application/json", b'{"error": {"message": "injected"}}')
            headers = {"content-type": "application/json"}
            url = self.upstream + request.path
            async with client.stream("POST", url, content=request.body, headers=headers) as response:
                kept = ("content-type", "x-audio-sample-rate", "x-audio-channels")
                passed = {name: response.headers[name] for name in kept if name in response.headers}
                await exchange.start(response.status_code, passed)
                units = _units(response)
                if not chosen or response.status_code != 200:
                    async for unit in units:
                        await exchange.send(unit)
                    return await exchange.end()
                if self.fault in ("swap", "swap-midway"):
                    await self._swap(exchange, units)
                else:
                    await self._spoil(exchange, units)

    async def _spoil(self, exchange: Exchange, units: AsyncIterator[bytes]) -> None:
        passed = 0
        async for unit in units:
            audio, rebuild = _open(unit)
            if audio is None or rebuild is None:
                # Not audio: the done event, or the end of a body whose tail has been dropped.
                await exchange.send(unit)
                continue
            passed += 1
            if passed <= self.after:
                await exchange.send(unit)
                continue
            first = passed == self.after + 1
            self.spoiled += first
            if self.fault == "truncate":
                continue
            if self.fault == "shorter":
                if not first:
                    await exchange.send(unit)
            elif self.fault == "longer":
                await exchange.send(unit)
                if first:
                    await exchange.send(unit)
            elif self.fault == "pcm":
                await exchange.send(rebuild(_nudge(audio)) if first else unit)
            elif self.fault == "odd-bytes":
                await exchange.send(rebuild(audio[:-1]) if first else unit)
            elif self.fault == "error-in-200":
                error = {"type": "speech.audio.error", "error": {"message": "injected", "code": 500}}
                text = json.dumps(error).encode()
                await exchange.send(b"event: speech.audio.error\ndata: " + text + b"\n\n" if _is_sse(unit) else text)
                return await exchange.end()
            elif self.fault == "cut":
                return exchange.abort()
            elif self.fault == "end-without-done":
                return await exchange.end()
            elif self.fault == "stall":
                await asyncio.sleep(3600)
        await exchange.end()

    async def _swap(self, exchange: Exchange, units: AsyncIterator[bytes]) -> None:
        self._paired = self._paired or asyncio.Event()
        mine = len(self._pair)
        if mine > 1:  # more than two were chosen: the rest pass
            async for unit in units:
                await exchange.send(unit)
            return await exchange.end()
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._pair.append(queue)
        if len(self._pair) == 2:
            self._paired.set()

        async def fill() -> None:
            async for unit in units:
                await queue.put(unit)
            await queue.put(None)

        filler = asyncio.create_task(fill())
        try:
            await asyncio.wait_for(self._paired.wait(), 60)
            self.spoiled += 1
            before = 0 if self.fault == "swap" else self.after
            for _ in range(before):
                await exchange.send(await queue.get() or b"")
            other = self._pair[1 - mine]
            if before:
                # Both must have taken their own first part before either takes the other's.
                await asyncio.sleep(0.5)
            while (unit := await other.get()) is not None:
                await exchange.send(unit)
            await exchange.end()
            # The other client still reads what this one's upstream sends: leaving would close that.
            await filler
        finally:
            filler.cancel()


def _is_sse(unit: bytes) -> bool:
    return unit.startswith(b"event:") or unit.startswith(b"data:")


async def _units(response: httpx.Response) -> AsyncIterator[bytes]:
    """Whole events of an event stream, or whole-sample pieces of a raw body."""
    separator = b"\n\n" if response.headers.get("content-type", "").startswith("text/event-stream") else None
    held = b""
    async for data in response.aiter_bytes():
        held += data
        if separator is None:
            whole = len(held) // 2 * 2
            if whole:
                yield held[:whole]
                held = held[whole:]
            continue
        while separator in held:
            event, held = held.split(separator, 1)
            yield event + separator
    if held:
        yield held


def _open(unit: bytes) -> tuple[bytes | None, Callable[[bytes], bytes] | None]:
    """The audio of a unit and how to make a unit of other audio; (None, None) for an event that carries none."""
    if not _is_sse(unit):
        return unit, lambda audio: audio
    payload = json.loads(next(line[5:] for line in unit.splitlines() if line.startswith(b"data:")))
    if "audio" not in payload:
        return None, None

    def rebuild(audio: bytes) -> bytes:
        changed = payload | {"audio": base64.b64encode(audio).decode()}
        return b"event: speech.audio.delta\ndata: " + json.dumps(changed).encode() + b"\n\n"

    return base64.b64decode(payload["audio"]), rebuild


def _nudge(audio: bytes) -> bytes:
    samples = np.frombuffer(audio, dtype="<i2").astype(np.int32)
    samples[len(samples) // 2] += np.where(samples[len(samples) // 2] > 0, -1000, 1000)
    return samples.astype("<i2").tobytes()
