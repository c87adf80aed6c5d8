# SPDX-License-Identifier: Apache-2.0
"""A deterministic stand-in for a speech server: enough of ``/v1/audio/speech`` to test the client and the proxy fast.

What it says depends on the text and the seed alone, in chunks of 25 ms of audio, each a few milliseconds apart.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .loopback import Exchange

RATE = 24_000
CHUNK_SAMPLES = 600
SAMPLES_PER_CHARACTER = 120


def speech_pcm(text: str, seed: int) -> np.ndarray:
    """`[samples]` int16: the audio that the fake says for a text and a seed."""
    rng = np.random.default_rng([zlib.crc32(text.encode()), seed])
    return rng.integers(-8000, 8000, len(text) * SAMPLES_PER_CHARACTER, dtype=np.int16)


@dataclass
class FakeSpeech:
    """`noise_lsb` makes it irreproducible, `max_running` queues requests as max_num_seqs does."""

    noise_lsb: int = 0
    max_running: int = 64
    tick_s: float = 0.003
    state_format: bool = True
    models: tuple[str, ...] = ("fake",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    disconnects: int = 0

    def __post_init__(self) -> None:
        self._slots: asyncio.Semaphore | None = None
        self._rng = np.random.default_rng()

    async def __call__(self, exchange: Exchange) -> None:
        path = exchange.request.path
        if path == "/v1/models":
            listed = {"data": [{"id": name} for name in self.models]}
            await exchange.reply(200, "application/json", json.dumps(listed).encode())
        elif path == "/version":
            await exchange.reply(200, "application/json", b'{"version": "fake"}')
        elif path == "/v1/audio/speech":
            self._slots = self._slots or asyncio.Semaphore(self.max_running)
            async with self._slots:
                try:
                    await self._speak(exchange)
                except ConnectionError:
                    self.disconnects += 1
                    raise
        else:
            await exchange.reply(404, "application/json", b'{"error": {"message": "not found"}}')

    async def _speak(self, exchange: Exchange) -> None:
        body = json.loads(exchange.request.body)
        self.bodies.append(body)
        if not body.get("input"):
            error = {"error": {"message": "input is empty", "code": 400}}
            return await exchange.reply(400, "application/json", json.dumps(error).encode())
        pcm = speech_pcm(body["input"], body.get("seed", 0)).astype(np.int32)
        if self.noise_lsb:
            pcm = pcm + self._rng.integers(-self.noise_lsb, self.noise_lsb + 1, len(pcm))
        audio = pcm.astype("<i2").tobytes()
        chunks = [audio[at : at + 2 * CHUNK_SAMPLES] for at in range(0, len(audio), 2 * CHUNK_SAMPLES)]
        if body["response_format"] == "wav":
            chunks[0] = _wav_header() + chunks[0]
        if body.get("stream_format") == "audio":
            headers = {"x-audio-sample-rate": str(RATE), "x-audio-channels": "1"} if self.state_format else {}
            await exchange.start(200, {"content-type": "audio/pcm", **headers})
        else:
            await exchange.start(200, {"content-type": "text/event-stream; charset=utf-8"})
            chunks = [delta(chunk, self.state_format) for chunk in chunks] + [DONE]
        for chunk in chunks:
            await asyncio.sleep(self.tick_s)
            await exchange.send(chunk)
        await exchange.end()


@dataclass
class FixedAnswer:
    """Answers every speech request with the same 200 body, and ``/v1/models`` with `models`."""

    content_type: str | None
    body: bytes
    models: bytes = b'{"data": [{"id": "fake"}]}'

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.request.method == "GET":
            return await exchange.reply(200, "application/json", self.models)
        await exchange.start(200, {} if self.content_type is None else {"content-type": self.content_type})
        await exchange.send(self.body)
        await exchange.end()


DONE = b'event: speech.audio.done\ndata: {"type":"speech.audio.done"}\n\n'


def delta(audio: bytes, state_format: bool = True) -> bytes:
    payload: dict[str, Any] = {"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()}
    if state_format:
        payload |= {"sample_rate": RATE, "channels": 1}
    return f"event: speech.audio.delta\ndata: {json.dumps(payload)}\n\n".encode()


def error_event(message: str) -> bytes:
    payload = {"type": "speech.audio.error", "error": {"message": message, "code": 500}}
    return f"event: speech.audio.error\ndata: {json.dumps(payload)}\n\n".encode()


def _wav_header() -> bytes:
    unknown = 0xFFFFFFFF
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", unknown, b"WAVE", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16, b"data", unknown
    )
