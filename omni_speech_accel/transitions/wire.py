# SPDX-License-Identifier: Apache-2.0
"""What a streamed ``/v1/audio/speech`` body means: SSE events or raw bytes in, PCM bytes and an ending out.

The host streams in two forms. With ``stream: true`` alone it sends ``speech.audio.delta`` events (base64 audio; newer
hosts add ``sample_rate`` and ``channels``), then ``speech.audio.done``, or ``speech.audio.error`` under a 200 status.
With ``stream_format: "audio"`` it sends the bytes themselves and, on newer hosts, ``X-Audio-*`` headers; a failure
shows there only as a body that breaks off. A WAV stream opens with a 44-byte header whose sizes are placeholders.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import struct
from collections.abc import Mapping
from typing import Any, Protocol

WAV_HEADER_BYTES = 44
# A raw body that opens like JSON is held back while it may still be an error document: PCM may begin with the same
# byte, but not go on as text for long. No error document of the host is longer than this.
_MAX_ERROR_DOCUMENT_BYTES = 64 * 1024
_ERROR_TAIL_BYTES = 4096
# Content types that a body of samples may have, by the format asked for; a WAV body is known by its header as well.
_PCM_TYPES = frozenset({"audio/pcm", "audio/x-pcm", "audio/l16", "audio/raw", "application/octet-stream"})
_WAV_TYPES = frozenset({"audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"})
_AUDIO_TYPES = {"pcm": _PCM_TYPES, "wav": _PCM_TYPES | _WAV_TYPES}
# More than any audio has; a WAV header can hold their product.
MAX_SAMPLE_RATE = 768_000
MAX_CHANNELS = 64
_TRAILING_TEXT = re.compile(rb"[^\x00-\x08\x0b\x0c\x0e-\x1f]*\Z")


class BodyError(Exception):
    """The body says that the request failed, or is not the format that it claims to be."""

    def __init__(self, message: str, *, malformed: bool = False) -> None:
        super().__init__(printable(message))
        self.malformed = malformed


class AudioBody(Protocol):
    """Incremental reader of one response body."""

    sample_rate: int | None
    channels: int | None

    def feed(self, data: bytes) -> bytes:
        """Audio bytes completed by `data`; raises `BodyError` for a reported failure or a malformed body."""

    def finish(self) -> tuple[bytes, bool]:
        """Audio bytes still held back, and whether the body ended as a complete one does."""


class SseBody:
    """Reader of ``text/event-stream`` bodies."""

    def __init__(self) -> None:
        self.sample_rate: int | None = None
        self.channels: int | None = None
        self._buffer = b""
        self._done = False

    def feed(self, data: bytes) -> bytes:
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        audio = b""
        while b"\n\n" in self._buffer:
            event, self._buffer = self._buffer.split(b"\n\n", 1)
            audio += self._event(event)
        return audio

    def finish(self) -> tuple[bytes, bool]:
        if self._buffer.strip() and not self._done:
            return b"", False
        return b"", self._done

    def _event(self, event: bytes) -> bytes:
        lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
        names = [line[6:].strip().lower() for line in event.split(b"\n") if line.startswith(b"event:")]
        failed = any(b"error" in name for name in names)
        if not lines and not failed:
            return b""
        text = b"\n".join(lines)
        if text == b"[DONE]":
            self._done = True
            return b""
        try:
            payload = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = "an error event" if failed else "an event is not JSON"
            raise BodyError(f"{what}: {text[:80]!r}", malformed=not failed) from error
        if not isinstance(payload, dict):
            raise BodyError(f"an event is not a JSON object: {text[:80]!r}", malformed=True)
        kind = payload.get("type")
        if failed or _reports_error(payload):
            raise BodyError(_error_message(payload))
        if kind == "speech.audio.done":
            self._done = True
            return b""
        if kind != "speech.audio.delta":
            return b""
        if self._done:
            raise BodyError("audio after speech.audio.done", malformed=True)
        self.sample_rate = _stated("sample_rate", payload.get("sample_rate"), MAX_SAMPLE_RATE) or self.sample_rate
        self.channels = _stated("channels", payload.get("channels"), MAX_CHANNELS) or self.channels
        try:
            return base64.b64decode(payload["audio"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise BodyError("a speech.audio.delta event without valid base64 audio", malformed=True) from error


class RawBody:
    """Reader of raw ``audio/pcm`` or ``audio/wav`` bodies. Their end is the end of the HTTP body.

    A body of any other content type is no audio. One without a content type is audio unless it reads as text.
    Raises `BodyError` if the headers state an impossible format.
    """

    def __init__(self, headers: Mapping[str, str], response_format: str = "pcm") -> None:
        self.sample_rate = _stated("x-audio-sample-rate", headers.get("x-audio-sample-rate"), MAX_SAMPLE_RATE)
        self.channels = _stated("x-audio-channels", headers.get("x-audio-channels"), MAX_CHANNELS)
        self._type = _content_type(headers)
        self._is_audio = self._type in _AUDIO_TYPES.get(response_format, _PCM_TYPES)
        self._held: bytearray | None = bytearray()
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        self._tail = (self._tail + data)[-_ERROR_TAIL_BYTES:]
        if self._held is None:
            return data
        self._held += data
        if self._is_audio:
            hold = self._held[:1] == b"{" and _is_text(self._held) and len(self._held) < _MAX_ERROR_DOCUMENT_BYTES
        else:
            hold = bool(self._type) or _is_text(self._held)
        if not hold:
            return self._release()
        if not self._is_audio:
            del self._held[_MAX_ERROR_DOCUMENT_BYTES:]
        return b""

    def finish(self) -> tuple[bytes, bool]:
        held = bytes(self._held or b"")
        error = _trailing_error(held or self._tail)
        if error:
            raise BodyError(_error_message(error))
        if not self._is_audio and (self._type or held):
            what = f"a body of type {self._type[:80]}" if self._type else "text without a content type"
            raise BodyError(f"{what} where audio was expected: {held[:80]!r}", malformed=True)
        return self._release(), True

    def _release(self) -> bytes:
        held = bytes(self._held or b"")
        self._held = None
        return held


class WavStripper:
    """Takes the streaming WAV header off the front of an audio byte stream and reads the format from it."""

    def __init__(self) -> None:
        self.sample_rate: int | None = None
        self.channels: int | None = None
        self._head: bytes | None = b""

    def feed(self, audio: bytes) -> bytes:
        """Sample bytes in `audio`; raises `BodyError` when the stream does not open with a 16-bit PCM WAV header."""
        if self._head is None:
            return audio
        self._head += audio
        if len(self._head) < WAV_HEADER_BYTES:
            return b""
        head, self._head = self._head, None
        if head[:4] != b"RIFF" or head[8:16] != b"WAVEfmt " or head[36:40] != b"data":
            raise BodyError("the stream does not open with a WAV header", malformed=True)
        _, self.channels, self.sample_rate, _, _, bits = struct.unpack("<HHIIHH", head[20:36])
        if bits != 16:
            raise BodyError(f"a WAV stream of {bits}-bit samples; 16-bit PCM was expected", malformed=True)
        _stated("the WAV header's sample rate", self.sample_rate, MAX_SAMPLE_RATE)
        _stated("the WAV header's channels", self.channels, MAX_CHANNELS)
        return head[WAV_HEADER_BYTES:]


def body_reader(headers: Mapping[str, str], response_format: str = "pcm") -> AudioBody:
    """The reader for a response with these (lower-case) headers to a request for `response_format`.

    Raises `BodyError` if the headers state an impossible format.
    """
    return SseBody() if _content_type(headers) == "text/event-stream" else RawBody(headers, response_format)


def printable(text: str) -> str:
    """`text` without what no file or terminal can take: lone surrogates, which JSON can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _trailing_error(data: bytes) -> dict[str, Any] | None:
    """The error document that `data` ends with, be it alone or behind samples."""
    text = _TRAILING_TEXT.search(data)
    at = data.find(b"{", text.start() if text else len(data))
    while at >= 0:
        with contextlib.suppress(ValueError, RecursionError):
            payload = json.loads(data[at:])
            if isinstance(payload, dict) and (payload.get("error") or payload.get("object") == "error"):
                return payload
        at = data.find(b"{", at + 1)
    return None


def _is_text(data: bytes | bytearray) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in data[:_ERROR_TAIL_BYTES])


def _reports_error(payload: Mapping[str, Any]) -> bool:
    """Whether an event is an error, be it the host's or what a web framework or a proxy makes of one."""
    kind = payload.get("type")
    if payload.get("error") or payload.get("object") == "error" or (isinstance(kind, str) and "error" in kind.lower()):
        return True
    if kind in ("speech.audio.delta", "speech.audio.done"):
        return False
    return bool(payload.get("detail") or (kind is None and payload.get("message")))


def _stated(what: str, value: object, most: int) -> int | None:
    """A stated positive number, or None if none is; raises `BodyError` for one that no audio has."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
    except OverflowError:
        number = most + 1
    if number > most:
        raise BodyError(f"{what} is {str(value)[:40]}; no audio has more than {most}", malformed=True)
    return int(number) if number > 0 else None


def _error_message(payload: Mapping[str, Any]) -> str:
    error = payload.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    try:
        return str(message or payload.get("message") or payload.get("detail") or payload)[:300]
    except RecursionError:
        return "an error document that is nested too deep"
