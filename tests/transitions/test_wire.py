# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_speech_accel.transitions.wire import BodyError, RawBody, SseBody, WavStripper, body_reader

from .fake_speech import DONE, _wav_header, delta, error_event

pieces_of_audio = st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6)


def cut_into_reads(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


def read(body, reads: list[bytes]) -> tuple[bytes, bool]:
    audio = b"".join(body.feed(data) for data in reads)
    rest, complete = body.finish()
    return audio + rest, complete


@example([b"ab", b"cd"], list(range(1000)), True)  # byte by byte: a line end split in two
@given(pieces_of_audio, st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_sse_audio_is_whole_wherever_the_reads_fall(pieces, cuts, carriage_returns):
    data = b": a comment\n\n" + b"".join(delta(piece) for piece in pieces) + DONE
    if carriage_returns:
        data = data.replace(b"\n", b"\r\n")
    body = SseBody()
    assert read(body, cut_into_reads(data, cuts)) == (b"".join(pieces), True)
    assert (body.sample_rate, body.channels) == (24_000, 1)


@given(st.binary(max_size=300), st.lists(st.integers(0, 10_000), max_size=8))
def test_raw_audio_is_whole_wherever_the_reads_fall(data, cuts):
    assert read(RawBody({"content-type": "audio/pcm"}), cut_into_reads(data, cuts)) == (data, True)


@pytest.mark.parametrize("opening", [b"{\x00\x7b\x00", b"[\x01", b'{"err\x00'])
def test_pcm_that_opens_like_json_is_not_held_back(opening):
    body = RawBody({"content-type": "audio/pcm"})
    assert body.feed(opening) == opening


def test_an_sse_stream_without_its_last_event_is_not_complete():
    assert read(SseBody(), [delta(b"ab")]) == (b"ab", False)
    assert read(SseBody(), [delta(b"ab"), DONE[:-5]]) == (b"ab", False)


@pytest.mark.parametrize(
    ("event", "message", "malformed"),
    [
        (error_event("device lost"), "device lost", False),
        (b'data: {"error": "out of memory"}\n\n', "out of memory", False),
        (b"data: {broken\n\n", "not JSON", True),
        (b"data: [1]\n\n", "not a JSON object", True),
        (b'data: {"type": "speech.audio.delta"}\n\n', "without valid base64", True),
        (b'data: {"type": "speech.audio.delta", "audio": "a"}\n\n', "without valid base64", True),
        (DONE + delta(b"ab"), "after speech.audio.done", True),
        (b'event: error\ndata: {"message": "boom"}\n\n', "boom", False),
        (b"event: error\ndata: boom\n\n", "boom", False),
        (b"event: error\n\n", "an error event", False),
        (b'data: {"detail": "boom"}\n\n', "boom", False),
        (b'data: {"type": "response.error", "message": "boom"}\n\n', "boom", False),
        (b'data: {"object": "error", "message": "\\ud800 boom"}\n\n', "[?] boom", False),
        ('data: {"type": "speech.audio.delta", "audio": "é"}\n\n'.encode(), "without valid base64", True),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not JSON", True),
        *(
            (f'data: {{"type": "speech.audio.delta", "audio": "", "{key}": {value}}}\n\n'.encode(), key, True)
            for key, value in [
                ("sample_rate", "Infinity"),
                ("sample_rate", "1e400"),
                ("sample_rate", str(10**12)),
                ("channels", "70000"),
            ]
        ),
    ],
)
def test_what_is_wrong_in_an_event_stream_is_said(event, message, malformed):
    with pytest.raises(BodyError, match=message) as caught:
        read(SseBody(), [delta(b"ab") + event])
    assert caught.value.malformed is malformed


@pytest.mark.parametrize("before", [b"", b"\x01\x00" * 50, b"\x01\x00{}"])
@pytest.mark.parametrize("document", [{"error": {"message": "boom"}}, {"object": "error", "message": "boom"}])
def test_an_error_document_under_a_200_is_seen_alone_and_behind_audio(before, document):
    with pytest.raises(BodyError, match="boom"):
        read(RawBody({"content-type": "audio/pcm"}), [before, json.dumps(document).encode()])


def test_json_where_audio_was_expected_is_malformed():
    with pytest.raises(BodyError, match="where audio was expected") as caught:
        read(RawBody({"content-type": "application/json"}), [b'{"ok": true}'])
    assert caught.value.malformed


@pytest.mark.parametrize(
    "content_type",
    ["text/html", "text/plain; charset=utf-8", "Application/JSON", "audio/mpeg", "audio/wav", "video/mp4", "x"],
)
@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"\x00\x01" * 50_000, b""])
def test_a_body_of_another_type_is_never_audio(content_type, body):
    with pytest.raises(BodyError, match="where audio was expected") as caught:
        read(body_reader({"content-type": content_type}), [body])
    assert caught.value.malformed


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"data: {}\n\n", b'{"detail": 1}', b"oops", b"x" * 200_000])
def test_text_without_a_content_type_is_no_audio(body):
    with pytest.raises(BodyError, match="text without a content type"):
        read(body_reader({}), [body[:5], body[5:]])


@pytest.mark.parametrize(
    ("content_type", "asked"),
    [
        (None, "pcm"),
        ("Audio/PCM; rate=24000", "pcm"),
        ("application/octet-stream", "pcm"),
        ("audio/wav", "wav"),
        ("audio/pcm", "wav"),
    ],
)
def test_samples_of_a_fitting_type_are_audio(content_type, asked):
    headers = {} if content_type is None else {"content-type": content_type}
    assert read(body_reader(headers, asked), [b"ab\x00\x01"]) == (b"ab\x00\x01", True)


def test_an_impossible_format_in_a_header_is_malformed():
    with pytest.raises(BodyError, match="x-audio-channels is 70000"):
        body_reader({"content-type": "audio/pcm", "x-audio-channels": "70000"})
    header = _wav_header()
    with pytest.raises(BodyError, match="sample rate is 4294967295"):
        WavStripper().feed(header[:24] + b"\xff" * 4 + header[28:])


def test_unknown_events_and_done_markers_are_passed_over():
    assert read(SseBody(), [b'data: {"type": "speech.audio.info"}\n\n', delta(b"ab"), b"data: [DONE]\n\n"]) == (
        b"ab",
        True,
    )


@given(st.binary(min_size=0, max_size=50), st.lists(st.integers(0, 10_000), max_size=8))
def test_the_wav_header_comes_off_wherever_the_reads_fall(samples, cuts):
    wav = WavStripper()
    assert b"".join(map(wav.feed, cut_into_reads(_wav_header() + samples, cuts))) == samples
    assert (wav.sample_rate, wav.channels) == (24_000, 1)


def test_a_stream_without_a_wav_header_or_of_other_samples_is_malformed():
    with pytest.raises(BodyError, match="WAV header"):
        WavStripper().feed(bytes(44))
    with pytest.raises(BodyError, match="8-bit"):
        WavStripper().feed(_wav_header()[:34] + b"\x08\x00" + _wav_header()[36:])


def test_the_reader_follows_the_content_type():
    assert isinstance(body_reader({"content-type": "text/event-stream; charset=utf-8"}), SseBody)
    assert isinstance(body_reader({"content-type": "Text/Event-Stream;x"}), SseBody)
    raw = body_reader({"content-type": "audio/pcm", "x-audio-sample-rate": "44100", "x-audio-channels": "2"})
    assert (raw.sample_rate, raw.channels) == (44_100, 2)
    unstated = body_reader({"x-audio-sample-rate": "fast"})
    assert unstated.sample_rate is None
