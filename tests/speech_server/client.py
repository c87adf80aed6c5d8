# SPDX-License-Identifier: Apache-2.0
"""Requests to a :class:`~tests.speech_server.server.SpeechServer`."""

from __future__ import annotations

import base64
import io
import json
import random
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

CODEC_VOCABULARY = 6561  # flow.yaml of both models: vocab_size
SAMPLES_PER_CODE = 960  # 25 codec tokens a second at 24 kHz


class RequestRefused(RuntimeError):
    """The server answered with an HTTP error; ``status`` and ``body`` hold what it said."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Wav:
    """A WAV file as it came, and its samples: int16, mono."""

    data: bytes
    rate: int
    samples: npt.NDArray[np.int16]

    @classmethod
    def parse(cls, data: bytes) -> Wav:
        """Raises ValueError unless the data is mono 16-bit PCM."""
        with wave.open(io.BytesIO(data)) as file:
            if (file.getnchannels(), file.getsampwidth()) != (1, 2):
                raise ValueError(f"{file.getnchannels()} channels of {file.getsampwidth()} bytes, not mono 16-bit")
            # A streaming writer cannot know the length for the header, so take what is there.
            frames = file.readframes(len(data))
            return cls(data, file.getframerate(), np.frombuffer(frames, np.int16))

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def random_codes(count: int, seed: int = 0) -> list[int]:
    """Codec tokens of one utterance; 25 make a second."""
    draw = random.Random(seed)
    return [draw.randrange(1, CODEC_VOCABULARY) for _ in range(count)]


def _post(url: str, codes: Sequence[int], reference: Path | None, seconds: float, **fields: Any) -> Any:
    body: dict[str, Any] = {"input": " ".join(map(str, codes)), **fields}
    if reference is not None:
        body["ref_audio"] = "data:audio/wav;base64," + base64.b64encode(reference.read_bytes()).decode()
    request = urllib.request.Request(
        f"{url}/v1/audio/speech", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        return urllib.request.urlopen(request, timeout=seconds)
    except urllib.error.HTTPError as error:
        raise RequestRefused(error.code, error.read().decode(errors="replace")) from None


def synthesize(url: str, codes: Sequence[int], reference: Path | None = None, *, seconds: float = 300) -> Wav:
    """One request, one WAV. Raises RequestRefused."""
    with _post(url, codes, reference, seconds, response_format="wav") as answer:
        return Wav.parse(answer.read())


def stream_pcm(
    url: str, codes: Sequence[int], reference: Path | None = None, *, seconds: float = 300
) -> Iterator[bytes]:
    """The raw 24 kHz int16 audio of one request, piece by piece as its server-sent events arrive.

    Raises RequestRefused, or ValueError where the stream ends without its closing event.
    """
    with _post(url, codes, reference, seconds, response_format="pcm", stream=True, stream_format="sse") as answer:
        for line in answer:
            kind, _, data = line.decode().strip().partition(": ")
            if kind != "data":
                continue
            event = json.loads(data)
            if event["type"] == "speech.audio.done":
                return
            if event["type"] != "speech.audio.delta":
                raise ValueError(f"the stream reports {data}")
            yield base64.b64decode(event["audio"])
    raise ValueError("the stream ended without speech.audio.done")


def item_counts(url: str) -> dict[tuple[str, str], float]:
    """``{(item, event): count}`` out of the server's ``/metrics``, summed over stages.

    The counts of a stage are there only where the server runs with ``PROMETHEUS_MULTIPROC_DIR``.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    counts: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "omni_speech_accel_events_total":
                key = (sample.labels["item"], sample.labels["event"])
                counts[key] = counts.get(key, 0) + sample.value
    return counts
