# SPDX-License-Identifier: Apache-2.0
"""The whole command over real loopback HTTP: a healthy pair passes, every injected fault is found and named."""

from __future__ import annotations

import csv
import json
import wave
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_speech_accel.cli.app import app
from omni_speech_accel.transitions.inputs import builtin_pool
from omni_speech_accel.transitions.plan import PATTERNS, build_plan

from .fake_speech import CHUNK_SAMPLES, RATE, SAMPLES_PER_CHARACTER, FakeSpeech
from .fault_proxy import FAULTS, FaultProxy
from .loopback import serve

EXPECTED_FAULT = {
    "truncate": "truncated",
    "swap": "swapped rows",
    "swap-midway": "swapped rows",
    "longer": "wrong length",
    "shorter": "wrong length",
    "error-in-200": "error inside a 200",
    "json-200": "error inside a 200",
    "cut": "cut stream",
    "end-without-done": "cut stream",
    "stall": "timeout",
    "pcm": "different PCM",
    "odd-bytes": "malformed body",
    "http-500": "HTTP error",
}


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["transitions", *arguments], env={"COLUMNS": "240", "VLLM_API_KEY": ""})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def report_of(*arguments: str) -> tuple[int, dict]:
    code, stdout, _ = invoke(*arguments, "--json")
    return code, json.loads(stdout)


def seeds_of(name: str, *streams: int, size: int = 3) -> list[int]:
    """The request seeds of some streams of one transition of the default plan."""
    transition = next(item for item in build_plan(builtin_pool(), [size], 0) if item.name == name)
    return [transition.streams[stream].seed for stream in streams]


def problems(report: dict) -> set[tuple[str, int, str]]:
    return {
        (transition["name"], row["stream"], row["fault"])
        for transition in report["transitions"]
        for row in transition["streams"]
        if row["status"] != "ok"
    }


@pytest.fixture(scope="module")
def upstream():
    with serve(FakeSpeech()) as url:
        yield url


def test_two_healthy_servers_match_in_every_transition():
    with serve(FakeSpeech()) as baseline, serve(FakeSpeech()) as candidate:
        code, report = report_of("--baseline", baseline, "--candidate", candidate, "--concurrency", "3,5")
    assert (code, report["passed"]) == (0, True), [t for t in report["transitions"] if t["status"] != "ok"]
    expected = [f"{p}-{n}" if sized else p for p, (_, sized) in PATTERNS.items() for n in ((3, 5) if sized else (1,))]
    assert [transition["name"] for transition in report["transitions"]] == expected
    assert all(transition["distance"]["max_lsb"] == 0 for transition in report["transitions"])
    assert all(transition["noise_floor"]["max_lsb"] == 0 for transition in report["transitions"])


@pytest.mark.parametrize("stream_format", ["sse", "audio"])
@pytest.mark.parametrize("response_format", ["pcm", "wav"])
@pytest.mark.parametrize("state_format", [True, False])
def test_every_form_of_stream_is_read(stream_format, response_format, state_format):
    with serve(FakeSpeech(state_format=state_format)) as url:
        code, report = report_of(
            "--baseline", url, "--candidate", url, "--only", "solo",
            "--stream-format", stream_format, "--response-format", response_format,
        )  # fmt: skip
    row = report["transitions"][0]["streams"][0]
    assert (code, row["max_lsb"]) == (0, 0)
    assert row["samples"] == row["input_chars"] * SAMPLES_PER_CHARACTER
    assert row["sample_rate"] == (RATE if state_format or response_format == "wav" else None)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_named_with_its_transition_and_stream(upstream, fault):
    streams = (0, 1) if fault.startswith("swap") else (1,)
    proxy = FaultProxy(upstream, fault, seeds_of("padded-3", *streams))
    with serve(proxy) as candidate:
        code, report = report_of(
            "--baseline", upstream, "--candidate", candidate, "--concurrency", "3", "--only", "solo,padded,late-join",
            "--stall-timeout", "0.5" if fault == "stall" else "10", "--attempts", "1",
        )  # fmt: skip
    assert proxy.spoiled == len(streams)
    assert code == 1
    assert problems(report) == {("padded-3", stream, EXPECTED_FAULT[fault]) for stream in streams}


@pytest.mark.parametrize("fault", ["truncate", "longer", "error-in-200", "json-200", "cut", "pcm", "swap"])
def test_faults_are_found_in_a_raw_audio_stream_too(upstream, fault):
    streams = (0, 1) if fault == "swap" else (1,)
    proxy = FaultProxy(upstream, fault, seeds_of("padded-3", *streams))
    with serve(proxy) as candidate:
        code, report = report_of(
            "--baseline", upstream, "--candidate", candidate, "--concurrency", "3", "--only", "solo,padded",
            "--stream-format", "audio", "--attempts", "1",
        )  # fmt: skip
    assert code == 1
    assert problems(report) == {("padded-3", stream, EXPECTED_FAULT[fault]) for stream in streams}


def test_the_prefix_that_a_leaving_client_received_is_compared(upstream):
    proxy = FaultProxy(upstream, "pcm", seeds_of("cancel-3", 1), after=0)
    with serve(proxy) as candidate:
        code, report = report_of(
            "--baseline", upstream, "--candidate", candidate, "--concurrency", "3", "--only", "cancel"
        )
    assert code == 1
    assert problems(report) == {("cancel-3", 1, "different PCM")}


def test_a_cancelled_stream_closes_its_connection():
    server = FakeSpeech(tick_s=0.01)
    with serve(server) as url:
        code, report = report_of("--baseline", url, "--candidate", url, "--concurrency", "3", "--only", "cancel")
        assert code == 0, report
    row = report["transitions"][0]["streams"][1]
    assert row["ending"] == "cancelled"
    assert 0 < row["samples"] < report["transitions"][0]["streams"][0]["samples"]
    assert server.disconnects == 3  # two baseline runs and one candidate run


def test_a_broken_baseline_is_not_blamed_on_the_candidate(upstream):
    proxy = FaultProxy(upstream, "cut", seeds_of("padded-3", 2))
    with serve(proxy) as baseline:
        code, report = report_of(
            "--baseline", baseline, "--candidate", upstream, "--concurrency", "3", "--only", "padded", "--attempts", "1"
        )
    assert code == 1
    assert problems(report) == {("padded-3", 2, "baseline failed")}


def test_a_noisy_baseline_is_reported_as_such_with_its_distance():
    with serve(FakeSpeech(noise_lsb=3)) as url:
        arguments = ("--baseline", url, "--candidate", url, "--concurrency", "3", "--only", "padded")
        code, report = report_of(*arguments)
        tolerant_code, tolerant = report_of(*arguments, "--pcm-tolerance", "6")
        snr_code, _ = report_of(*arguments, "--min-snr", "50")
        deaf_code, _ = report_of(*arguments, "--no-pcm")
    assert (code, report["status"]) == (1, "inconclusive")
    assert {fault for _, _, fault in problems(report)} == {"baseline not reproducible"}
    assert report["transitions"][0]["noise_floor"]["max_lsb"] == 6
    assert (tolerant_code, tolerant["passed"], snr_code, deaf_code) == (0, True, 0, 0)


def test_a_fault_beyond_the_noise_is_still_the_candidates():
    with serve(FakeSpeech(noise_lsb=3)) as url:
        proxy = FaultProxy(url, "pcm", seeds_of("padded-3", 1))
        with serve(proxy) as candidate:
            code, report = report_of(
                "--baseline", url, "--candidate", candidate, "--concurrency", "3", "--only", "padded",
                "--pcm-tolerance", "6",
            )  # fmt: skip
    assert code == 1
    assert problems(report) == {("padded-3", 1, "different PCM")}


def test_streams_swapped_on_a_noisy_server_are_recognised():
    with serve(FakeSpeech(noise_lsb=3)) as url:
        proxy = FaultProxy(url, "swap", seeds_of("padded-3", 0, 1))
        with serve(proxy) as candidate:
            code, report = report_of(
                "--baseline", url, "--candidate", candidate, "--concurrency", "3", "--only", "padded"
            )
    assert code == 1
    assert {("padded-3", 0, "swapped rows"), ("padded-3", 1, "swapped rows")} <= problems(report)
    messages = [row["message"] for row in report["transitions"][0]["streams"]]
    assert messages[0] == "carries the audio of the baseline's stream 1"


def test_streams_that_the_server_queues_do_not_count_as_a_padded_batch(upstream):
    with serve(FakeSpeech(max_running=2)) as candidate:
        code, report = report_of(
            "--baseline",
            upstream,
            "--candidate",
            candidate,
            "--concurrency",
            "3",
            "--only",
            "padded",
            "--attempts",
            "1",
        )
    assert (code, report["status"]) == (1, "inconclusive")
    assert report["transitions"][0]["not_exercised"] == ["candidate: 2 of 3 streams overlapped"]
    assert problems(report) == set()


def test_every_run_of_the_candidate_must_match(upstream):
    class Second(FaultProxy):
        async def _spoil(self, exchange, units):
            self.runs = getattr(self, "runs", 0) + 1
            if self.runs == 2:
                return await super()._spoil(exchange, units)
            async for unit in units:
                await exchange.send(unit)
            await exchange.end()

    with serve(Second(upstream, "pcm", seeds_of("padded-3", 0))) as candidate:
        arguments = ("--baseline", upstream, "--candidate", candidate, "--concurrency", "3", "--only", "padded")
        code, report = report_of(*arguments, "--repeat", "3", "--attempts", "1")
    bad = [row for row in report["transitions"][0]["streams"] if row["status"] != "ok"]
    assert code == 1
    assert [(row["run"], row["stream"]) for row in bad] == [(2, 0)]


def test_both_servers_get_the_same_requests_and_extra_fields_win():
    baseline, candidate = FakeSpeech(models=("one", "two")), FakeSpeech(models=("other",))
    with serve(baseline) as first, serve(candidate) as second:
        code, _ = report_of(
            "--baseline", first, "--candidate", second, "--concurrency", "3", "--only", "padded",
            "--baseline-runs", "1", "--attempts", "1", "--extra-body", '{"voice": "vivian", "stream": true}',
        )  # fmt: skip
    assert code == 0

    def bare(bodies):
        return sorted(({k: v for k, v in body.items() if k != "model"} for body in bodies), key=lambda b: b["seed"])

    assert {body["model"] for body in baseline.bodies} == {"one"}
    assert {body["model"] for body in candidate.bodies} == {"other"}
    assert bare(baseline.bodies) == bare(candidate.bodies)
    assert {body["voice"] for body in baseline.bodies} == {"vivian"}
    assert len({body["input"] for body in baseline.bodies}) == 3


def test_null_in_the_extra_body_removes_a_field():
    server = FakeSpeech()
    with serve(server) as url:
        report_of(
            "--baseline", url, "--candidate", url, "--only", "solo", "--extra-body", '{"seed": null, "model": null}'
        )
    assert server.bodies
    assert not any("seed" in body or "model" in body for body in server.bodies)


def test_inputs_come_from_a_file_with_fields_of_their_own(tmp_path):
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text('short one\n\n{"input": "' + "long " * 20 + '", "voice": "ryan"}\n', encoding="utf-8")
    server = FakeSpeech()
    with serve(server) as url:
        code, _ = report_of("--baseline", url, "--candidate", url, "--only", "solo", "--inputs", str(inputs))
    assert code == 0
    assert {body["voice"] for body in server.bodies} == {"ryan"}


def test_out_keeps_rows_report_and_the_audio_of_what_differs(upstream, tmp_path):
    proxy = FaultProxy(upstream, "truncate", seeds_of("padded-3", 1))
    with serve(proxy) as candidate:
        code, stdout, _ = invoke(
            "--baseline", upstream, "--candidate", candidate, "--concurrency", "3", "--only", "padded",
            "--out", str(tmp_path / "out"),
        )  # fmt: skip
    assert code == 1
    assert "padded-3, stream 1 (long): truncated: 0.025 s of audio where the baseline sends" in stdout
    assert "1 of 1 transitions fail: padded-3." in stdout
    rows = list(csv.DictReader((tmp_path / "out" / "rows.csv").open()))
    assert [row["status"] for row in rows] == ["ok", "fail", "ok"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["passed"] is False
    wavs = sorted(path.name for path in (tmp_path / "out" / "wav").iterdir())
    assert wavs == [f"padded-3-stream1-run1-{side}.wav" for side in ("baseline1", "baseline2", "candidate")]
    with wave.open(str(tmp_path / "out" / "wav" / wavs[-1])) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE, CHUNK_SAMPLES)


def test_a_recorded_baseline_stands_in_for_a_server_that_is_gone(tmp_path):
    arguments = ("--concurrency", "3", "--only", "solo,padded,cancel")
    with serve(FakeSpeech()) as url:
        code, stdout, _ = invoke("--baseline", url, "--record", str(tmp_path / "before"), *arguments)
        assert (code, stdout.strip()) == (0, f"recorded in {tmp_path / 'before'}")
    with serve(FakeSpeech()) as url:
        proxy = FaultProxy(url, "pcm", seeds_of("padded-3", 1))
        code, report = report_of("--baseline", str(tmp_path / "before"), "--candidate", url, *arguments)
        with serve(proxy) as candidate:
            bad_code, bad = report_of("--baseline", str(tmp_path / "before"), "--candidate", candidate, *arguments)
    assert (code, report["passed"]) == (0, True)
    assert "recorded" in report["servers"]["baseline"]
    assert report["transitions"][1]["noise_floor"] == {"max_lsb": 0, "snr_db": None, "length": 0}
    assert (bad_code, problems(bad)) == (1, {("padded-3", 1, "different PCM")})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seed", "1"), "other requests: padded-3, stream 0 differs in seed"),
        (("--extra-body", '{"voice": "x"}'), "other requests: padded-3, stream 0 differs in voice"),
        (("--concurrency", "5"), "the recording has no transition padded-5; it has: padded-3"),
    ],
)
def test_a_recording_of_other_requests_is_refused(tmp_path, upstream, arguments, said):
    folder = str(tmp_path / "before")
    common = ("--concurrency", "3", "--only", "padded")
    assert invoke("--baseline", upstream, "--record", folder, *common, "--baseline-runs", "1")[0] == 0
    code, _, stderr = invoke("--baseline", folder, "--candidate", upstream, *common, *arguments)
    assert (code, said in stderr) == (2, True), stderr


def test_a_recording_of_a_failing_server_says_so(tmp_path, upstream):
    with serve(FaultProxy(upstream, "cut", seeds_of("padded-3", 1))) as url:
        code, stdout, _ = invoke(
            "--baseline", url, "--record", str(tmp_path / "r"), "--concurrency", "3", "--only", "padded",
            "--attempts", "1",
        )  # fmt: skip
    assert code == 1
    assert "- padded-3, stream 1 (long): cut stream: the connection broke" in stdout
    assert "but not fit to compare with" in stdout


def test_a_damaged_recording_is_refused(tmp_path, upstream):
    folder = tmp_path / "before"
    assert invoke("--baseline", upstream, "--record", str(folder), "--only", "solo", "--baseline-runs", "1")[0] == 0
    audio = (folder / "audio.pcm").read_bytes()
    (folder / "audio.pcm").write_bytes(audio[:-2])
    code, _, stderr = invoke("--baseline", str(folder), "--candidate", upstream, "--only", "solo")
    assert (code, "audio is cut short" in stderr) == (2, True)
    (folder / "recording.json").write_text("{}")
    code, _, stderr = invoke("--baseline", str(folder), "--candidate", upstream, "--only", "solo")
    assert (code, "not a whole recording" in stderr) == (2, True)


def test_each_result_is_told_as_soon_as_it_is_known(upstream):
    with serve(FaultProxy(upstream, "cut", seeds_of("padded-3", 1))) as candidate:
        _, _, stderr = invoke(
            "--baseline", upstream, "--candidate", candidate, "--concurrency", "3", "--only", "padded,solo,recovery",
            "--attempts", "1",
        )  # fmt: skip
    told = [line for line in stderr.splitlines() if line]
    assert [line.split(":")[0] for line in told] == [
        "solo ...", "solo", "padded-3 ...", "padded-3, stream 1 (long)", "padded-3", "recovery ...", "recovery",
    ]  # fmt: skip


def test_an_unreachable_server_is_exit_2_and_names_the_url(upstream):
    code, _, stderr = invoke("--baseline", upstream, "--candidate", "http://127.0.0.1:9", "--only", "solo")
    assert code == 2
    assert "no server answers at http://127.0.0.1:9" in stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "solo,nonsense"), "unknown transition 'nonsense'; there are: solo, padded"),
        (("--concurrency", "1"), "at least 2 streams, got 1"),
        (("--concurrency", "three"), "--concurrency takes numbers"),
        (("--extra-body", "[1]"), "--extra-body must be a JSON object, got list"),
        (("--extra-body", "{"), "--extra-body:"),
        (("--extra-body", "@/does/not/exist"), "--extra-body:"),
        (("--inputs", "/does/not/exist"), "cannot read the inputs"),
        (("--no-pcm", "--min-snr", "30"), "exclude each other"),
        (("--record", "somewhere"), "give either --candidate, to compare, or --record"),
    ],
)
def test_wrong_usage_is_exit_2_before_any_request(arguments, said):
    code, _, stderr = invoke("--baseline", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9", *arguments)
    assert code == 2
    assert said in stderr


def test_help_names_every_pattern_and_the_exit_codes():
    code, stdout, _ = invoke("--help")
    text = " ".join(stdout.replace("│", " ").split())
    assert code == 0
    assert all(pattern in text for pattern in PATTERNS)
    assert "Exit code: 0 all transitions match" in text


def test_missing_httpx_is_said_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    code, _, stderr = invoke("--baseline", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9")
    assert code == 2
    assert "pip install 'omni-speech-accel[bench]'" in stderr


def test_importing_the_package_loads_neither_httpx_nor_numpy():
    import subprocess
    import sys

    code = "import sys, omni_speech_accel.transitions; print(sorted({'httpx', 'numpy', 'torch'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"
