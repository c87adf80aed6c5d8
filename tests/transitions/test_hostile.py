# SPDX-License-Identifier: Apache-2.0
"""Whatever a server sends, a user types or a disk holds: a verdict or exit code 2, never a pass or a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .fake_speech import DONE, FakeSpeech, FixedAnswer, delta
from .loopback import serve
from .test_end_to_end import invoke, problems, report_of

SOLO = ("--only", "solo", "--attempts", "1")
PCM = bytes(range(256)) * 20
NOWHERE = ("--baseline", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def upstream():
    with serve(FakeSpeech()) as url:
        yield url


@pytest.mark.parametrize(
    ("content_type", "body", "fault"),
    [
        ("text/html", b"<html>Welcome to nginx!!!</html>", "malformed body"),
        ("text/plain", b"internal server error!", "malformed body"),
        ("Application/JSON", b'{"detail": "Not Found"} ', "malformed body"),
        ("Application/JSON", b'{"error": "out of memory"}', "error inside a 200"),
        ("audio/mpeg", PCM, "malformed body"),
        (None, b"<html>Welcome to nginx!!!</html>", "malformed body"),
        ("Text/Event-Stream", delta(PCM), "cut stream"),
    ],
)
def test_what_is_not_audio_never_passes_even_if_both_servers_send_it(upstream, content_type, body, fault):
    with serve(FixedAnswer(content_type, body)) as url:
        code, alone = report_of("--baseline", upstream, "--candidate", url, *SOLO)
        both_code, both = report_of("--baseline", url, "--candidate", url, *SOLO)
    assert (code, problems(alone)) == (1, {("solo", 0, fault)})
    assert (both_code, problems(both)) == (1, {("solo", 0, "baseline failed")})


def test_an_event_stream_is_read_whatever_the_case_of_its_type():
    with serve(FixedAnswer("Text/Event-Stream", delta(PCM) + DONE)) as url:
        code, report = report_of("--baseline", url, "--candidate", url, *SOLO)
    assert (code, report["transitions"][0]["streams"][0]["samples"]) == (0, len(PCM) // 2)


@pytest.mark.parametrize(
    "payload",
    [
        '{"type": "speech.audio.delta", "audio": "é"}',
        '{"type": "speech.audio.delta", "audio": "AAAA", "sample_rate": Infinity}',
        '{"type": "speech.audio.delta", "audio": "AAAA", "sample_rate": 1000000000000}',
        '{"type": "speech.audio.delta", "audio": "AAAA", "channels": 70000}',
        '{"type": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_an_impossible_event_is_a_malformed_stream_and_the_report_is_kept(upstream, tmp_path, payload):
    event = f"data: {payload}\n\n".encode()
    with serve(FixedAnswer("text/event-stream", event + DONE)) as url:
        code, report = report_of("--baseline", upstream, "--candidate", url, *SOLO, "--out", str(tmp_path))
    assert (code, problems(report)) == (1, {("solo", 0, "malformed body")})
    assert (tmp_path / "report.json").is_file()


def test_models_that_cannot_be_read_are_exit_2_or_passed_over(upstream):
    with serve(FixedAnswer("text/plain", b"", models=b"[" * 300_000)) as url:
        code, _, stderr = invoke("--baseline", upstream, "--candidate", url, *SOLO)
    assert (code, "nested too deep" in stderr) == (2, True)
    models = b'{"data": [{"id": "\\ud800"}, {"id": 1}], "version": {"a": Infinity}}'
    with serve(FixedAnswer("text/event-stream", delta(PCM) + DONE, models=models)) as url:
        code, report = report_of("--baseline", url, "--candidate", url, *SOLO)
    assert (code, report["servers"]["candidate"]["models"], report["servers"]["candidate"]["version"]) == (
        0,
        ["?"],
        None,
    )


@pytest.mark.parametrize("option", ["--out", "--record"])
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_exit_2_before_any_request(tmp_path, option, place):
    (tmp_path / "file").write_text("kept")
    server = FakeSpeech()
    with serve(server) as url:
        other = () if option == "--record" else ("--candidate", url)
        code, _, stderr = invoke("--baseline", url, *other, *SOLO, option, str(tmp_path / place))
    assert (code, f"error: {option}: " in stderr, server.bodies) == (2, True, [])
    assert (tmp_path / "file").read_text() == "kept"


def test_a_report_that_cannot_be_saved_in_the_end_is_still_printed(upstream, tmp_path):
    (tmp_path / "report.json").mkdir()
    code, stdout, stderr = invoke(
        "--baseline", upstream, "--candidate", upstream, *SOLO, "--json", "--out", str(tmp_path)
    )
    assert (code, json.loads(stdout)["passed"], "error: --out: " in stderr) == (2, True, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--extra-body", '{"a": NaN}'), "--extra-body: "),
        (("--extra-body", '{"a": 1e400}'), "--extra-body: "),
        (("--extra-body", '{"a": "\\ud800"}'), "--extra-body: "),
        (("--extra-body", '{"a": ' + "[" * 50_000), "--extra-body: nested too deep"),
        (("--api-key", "schlüssel"), "--api-key must be printable ASCII"),
        (("--duration-tolerance", "inf"), "--duration-tolerance must be a number"),
        (("--min-snr", "inf"), "--min-snr must be a number"),
        (("--min-snr", "nan"), "--min-snr must be a number"),
        (("--timeout", "inf"), "--timeout must be a number"),
        (("--candidate", "http://127.0.0.1:99999"), "Port out of range"),
        (("--baseline", "http://127.0.0.1:99999"), "Port out of range"),
        (("--baseline", "http://"), "it names no host"),
    ],
)
def test_input_that_cannot_be_used_is_exit_2(arguments, said):
    code, _, stderr = invoke(*NOWHERE, *arguments)
    assert (code, said in " ".join(stderr.replace("│", " ").split())) == (2, True), stderr


@pytest.mark.parametrize("line", ['{"input": "\\ud800 hi"}', '{"input": "hi", "x": NaN}', '{"a":' * 50_000])
def test_an_inputs_line_that_cannot_be_sent_is_exit_2(tmp_path, line):
    (tmp_path / "inputs").write_text(line + "\n" + "long " * 50 + "\n")
    code, _, stderr = invoke(*NOWHERE, "--inputs", str(tmp_path / "inputs"))
    assert (code, "inputs:1: not a JSON object that can be sent" in stderr) == (2, True)


def test_record_and_out_exclude_each_other():
    code, _, stderr = invoke(*NOWHERE[:2], "--record", "a", "--out", "b")
    assert (code, "--out keeps a comparison" in stderr) == (2, True)


def test_a_size_that_is_given_twice_runs_once(upstream):
    _, report = report_of(
        "--baseline", upstream, "--candidate", upstream, "--only", "padded", "--concurrency", "3,3", "--attempts", "1"
    )
    assert [transition["name"] for transition in report["transitions"]] == ["padded-3"]


@pytest.fixture(scope="module")
def recorded(upstream, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    assert invoke("--baseline", upstream, "--record", str(folder), *SOLO, "--baseline-runs", "1")[0] == 0
    return json.loads((folder / "recording.json").read_text()), (folder / "audio.pcm").read_bytes()


def compare_with(upstream: str, folder: Path, index: object, audio: bytes) -> tuple[int, str]:
    (folder / "recording.json").write_text(json.dumps(index))
    (folder / "audio.pcm").write_bytes(audio)
    code, _, stderr = invoke("--baseline", str(folder), "--candidate", upstream, *SOLO)
    return code, stderr


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("runs",), []),
        (("runs",), {}),
        (("requests",), []),
        (("requests", "solo"), [1]),
        (("runs", "solo"), []),
        (("runs", "solo"), [[]]),
        (("runs", "solo", 0, 0), None),
        (("server",), []),
        (("server",), {}),
        (("runs", "solo", 0, 0, "pcm"), [-10, 5]),
        (("runs", "solo", 0, 0, "sample_rate"), 10**12),
        (("runs", "solo", 0, 0, "audio_at"), ["x"]),
        (("runs", "solo", 0, 0, "detail"), None),
    ],
)
def test_a_recording_damaged_anywhere_is_exit_2(upstream, recorded, tmp_path, path, value):
    index = json.loads(json.dumps(recorded[0]))
    place = index
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    code, stderr = compare_with(upstream, tmp_path, index, recorded[1])
    assert (code, "not a whole recording" in stderr) == (2, True), stderr


def test_audio_of_another_recording_is_refused_and_a_recording_without_a_digest_is_read(upstream, recorded, tmp_path):
    index, audio = recorded
    code, stderr = compare_with(upstream, tmp_path, index, bytes(byte ^ 1 for byte in audio))
    assert (code, "not what its index was written for" in stderr) == (2, True)
    older = {key: value for key, value in index.items() if key != "audio_sha256"}
    assert compare_with(upstream, tmp_path, older, audio)[0] == 0


def test_a_recording_that_fails_to_be_written_leaves_the_older_one(upstream, recorded, tmp_path, monkeypatch):
    assert compare_with(upstream, tmp_path, *recorded)[0] == 0

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, stderr = invoke("--baseline", upstream, "--record", str(tmp_path), *SOLO, "--seed", "5")
    monkeypatch.undo()
    assert (code, "No space left" in stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audio.pcm", "recording.json"]
    assert invoke("--baseline", str(tmp_path), "--candidate", upstream, *SOLO)[0] == 0


def stopped(number: int, *arguments: str) -> tuple[int, str, str]:
    """The command in a process of its own, sent a signal once it has begun its second transition."""
    command = [sys.executable, "-c", "from omni_speech_accel.cli.app import main; main()", "transitions", *arguments]
    environment = {**os.environ, "COLUMNS": "240", "PYTHONUNBUFFERED": "1", "VLLM_API_KEY": ""}
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith("padded-3 ..."):
            break
    time.sleep(0.1)
    process.send_signal(number)
    try:
        stdout, rest = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, stdout, seen + rest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_check_reports_what_it_compared(upstream, tmp_path, number):
    with serve(FakeSpeech(tick_s=0.05)) as slow:
        code, stdout, stderr = stopped(
            number, "--baseline", upstream, "--candidate", slow, "--only", "solo,padded,recovery", "--concurrency", "3",
            "--json", "--out", str(tmp_path),
        )  # fmt: skip
    report = json.loads(stdout)
    assert (code, report["passed"], report["status"]) == (1, False, "inconclusive"), stderr
    assert [(item["name"], item["status"]) for item in report["transitions"]] == [("solo", "ok")]
    assert report["not_run"] == ["padded-3", "recovery"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "Traceback" not in stderr


def test_a_stopped_recording_keeps_what_is_done_and_says_what_is_not(tmp_path, upstream):
    with serve(FakeSpeech(tick_s=0.05)) as slow:
        code, stdout, _ = stopped(
            signal.SIGTERM, "--baseline", slow, "--record", str(tmp_path), "--only", "solo,padded", "--concurrency", "3"
        )
    assert (code, "- padded-3: not run" in stdout) == (1, True)
    assert invoke("--baseline", str(tmp_path), "--candidate", upstream, *SOLO)[0] == 0
