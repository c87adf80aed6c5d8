# SPDX-License-Identifier: Apache-2.0
"""The recipe against a stand-in for ``vllm``, and its options against the real client's parser."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_speech_accel.cli.app import app
from omni_speech_accel.transitions import modes, ratios
from omni_speech_accel.transitions.processes import RunFailed, running_server, wait_for

from .fake_speech import RATE, SAMPLES_PER_CHARACTER, FakeSpeech
from .loopback import serve

REPO = Path(__file__).resolve().parents[2]
STUB = Path(__file__).resolve().parent / "stub_vllm.py"
ORDER = ["piecewise", "full", "full", "piecewise"]


class Recipe:
    """A folder with everything that one comparison needs, and a stub ``vllm`` on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        (folder / "bin").mkdir()
        stub = folder / "bin" / "vllm"
        stub.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(STUB))} "$@"\n')
        stub.chmod(0o755)
        (folder / "data" / "en").mkdir(parents=True)
        (folder / "data" / "en" / "meta.lst").write_text("id|said|prompt-wavs/a.wav|to say\n")
        for mode in ("piecewise", "full"):
            (folder / f"{mode}.yaml").write_text(f"base_config: x.yaml  # {mode}\n")
        self.reference = {"ref_audio_codes": [[1, 2], [3, 4]], "ref_text": "it's said"}
        (folder / "reference.json").write_text(json.dumps(self.reference))
        self.plan(speed={"piecewise": 1.0, "full": 1.25})

    def plan(self, **plan) -> None:
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def start(self, *more: str) -> subprocess.Popen:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        folder = self.folder
        command = [
            sys.executable, "-m", "omni_speech_accel", "compare-modes", "--model", "fish", "--dataset", folder / "data",
            "--out", self.out, "--reference", folder / "reference.json",
            "--a", folder / "piecewise.yaml", "--b", folder / "full.yaml",
            "--concurrency", "1,16", "--port", str(port), "--startup-timeout", "60", "--run-timeout", "120", *more,
        ]  # fmt: skip
        environment = os.environ | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "STUB_FOLDER": str(folder),
            "PYTHONPATH": str(REPO),
        }
        environment.pop("OMNI_DEPLOY_DIR", None)
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=REPO
        )

    def __call__(self, *more: str) -> subprocess.CompletedProcess:
        process = self.start(*more)
        stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def calls(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def served(self) -> list[str]:
        return [
            Path(after(call["argv"], "--deploy-config")).stem for call in self.calls() if call["argv"][0] == "serve"
        ]

    def runs(self) -> list[tuple[str, str]]:
        return [
            (call["serving"], after(call["argv"], "--result-filename"))
            for call in self.calls()
            if call["argv"][0] == "bench"
        ]

    def summary(self) -> dict:
        return json.loads((self.out / "summary.json").read_text())


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.fixture
def recipe(tmp_path):
    return Recipe(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A whole comparison of speeds, run once."""
    recipe = Recipe(tmp_path_factory.mktemp("measured"))
    recipe.done = recipe("--no-transitions", "--bench-args=--trust-remote-code")
    return recipe


def test_the_servers_are_visited_in_the_order_abba_each_with_discarded_and_measured_runs(measured):
    assert measured.done.returncode == 0, measured.done.stderr
    assert measured.served() == ORDER
    names = [f"c{c}-{label}.json" for c in (1, 16) for label in ("discard1", "run1", "run2")]
    assert measured.runs() == [(mode, name) for mode in ORDER for name in names]
    assert {call["deploy_dir"] for call in measured.calls()} != {None}


def test_every_run_is_the_workload_asked_for(measured):
    benches = [call["argv"] for call in measured.calls() if call["argv"][0] == "bench"]
    for argv in benches:
        assert argv[:3] == ["bench", "serve", "--omni"]
        assert after(argv, "--backend") == "openai-audio-speech"
        assert after(argv, "--num-prompts") == "64"
        assert after(argv, "--num-warmups") == "1"
        assert argv[-1] == "--trust-remote-code"
        body = json.loads(after(argv, "--extra-body"))
        assert body == {**measured.reference, "max_new_tokens": 500, "seed": 42}
    assert len({json.dumps([a for a in argv if "visit" not in a and "-run" not in a and "-dis" not in a])
                for argv in benches if after(argv, "--max-concurrency") == "1"}) == 1  # fmt: skip


def test_the_ratios_come_from_the_measured_runs_with_their_extremes(measured):
    summary = measured.summary()
    rows = {(row["concurrency"], row["metric"]): row for row in summary["ratios"]}
    throughput = rows[16, "audio_throughput"]
    assert (throughput["runs"], throughput["a_median"], throughput["b_median"]) == (4, 16.0, 20.0)
    assert (throughput["ratio"], throughput["ratio_min"], throughput["ratio_max"]) == (1.25, 1.25, 1.25)
    assert rows[1, "mean_audio_rtf"]["ratio"] == pytest.approx(0.8)
    assert summary["notes"] == ["the outputs of the arms were not compared"]
    raw = list(csv.DictReader((measured.out / "rows.csv").open()))
    assert len(raw) == 4 * 2 * 3
    assert {row["measured"] for row in raw if row["label"] == "discard1"} == {"False"}
    assert "1.250 (1.250 - 1.250)" in (measured.out / "summary.txt").read_text()


def test_extremes_and_medians_of_spread_runs():
    def row(arm: str, value: float) -> dict:
        return {"arm": arm, "concurrency": 1, **dict.fromkeys(ratios.METRICS, value)}

    found = ratios.ratios([row("A", 1.0), row("A", 2.0), row("A", 4.0), row("B", 3.0), row("B", 6.0), row("B", 1.5)])
    first = found[0]
    assert (first["a_median"], first["b_median"], first["ratio"]) == (2.0, 3.0, 1.5)
    assert (first["ratio_min"], first["ratio_max"]) == (1.5 / 4.0, 6.0 / 1.0)
    told = ratios.notes({"ratios": found, "outputs_match": True})
    assert any("single runs of the arms overlap" in note for note in told)


def test_everything_is_kept(measured):
    manifest = json.loads((measured.out / "manifest.json").read_text())
    assert {"commit", "versions", "device", "environment", "dataset_sha256", "load"} <= manifest.keys()
    assert manifest["arms"]["B"]["text"].endswith("# full\n")
    for name in ("visit1-A", "visit2-B", "visit3-B", "visit4-A"):
        visit = json.loads((measured.out / name / "visit.json").read_text())
        assert (measured.out / name / "server.log").stat().st_size
        assert visit["graph_modes_in_log"] == [{"A": "PIECEWISE", "B": "FULL"}[name[-1]]]
        for stem in ("c1-discard1", "c1-run1", "c16-run2"):
            assert (measured.out / name / f"{stem}.json").is_file()
            assert (measured.out / name / f"{stem}.log").is_file()
            assert visit["commands"][stem][1:3] == ["bench", "serve"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "the client run c1-run1 ended with 7; see "),
        ("request", "63 of 64 requests succeeded"),
        ("no-result", "the client left no readable"),
    ],
)
def test_a_failed_run_stops_the_comparison_and_resume_redoes_its_visit(recipe, how, said):
    speed = {"piecewise": 1.0, "full": 1.25}
    recipe.plan(speed=speed, fail={"visit2-B/c1-run1.json": how})
    done = recipe("--no-transitions", "--concurrency", "1")
    assert done.returncode == 1
    assert said in done.stderr
    assert "--resume goes on" in done.stderr
    assert not (recipe.out / "summary.json").exists()
    assert not (recipe.folder / "serving").exists()  # the server was stopped

    recipe.plan(speed=speed)
    done = recipe("--no-transitions", "--concurrency", "1", "--resume")
    assert done.returncode == 0, done.stderr
    assert "visit1-A: done earlier" in done.stderr
    assert recipe.served() == ["piecewise", "full", "full", "full", "piecewise"]
    assert (recipe.out / "visit2-B.aborted1" / "c1-run1.log").is_file()
    assert recipe.summary()["ratios"][0]["runs"] == 4


def test_sigterm_stops_the_server_and_keeps_what_was_measured(recipe):
    recipe.plan(speed={"piecewise": 1.0}, slow={"visit1-A/c1-run1.json": 60})
    process = recipe.start("--no-transitions")
    for line in process.stderr:
        if "c1-run1" in line:
            break
    while not recipe.runs() or recipe.runs()[-1][1] != "c1-run1.json":
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, "interrupted" in stderr, "Traceback" in stderr) == (130, True, False)
    assert not (recipe.folder / "serving").exists()  # the server was stopped
    assert (recipe.out / "visit1-A" / "c1-discard1.json").is_file()


def test_a_client_that_does_not_end_is_stopped_and_named(tmp_path):
    begun = time.monotonic()
    with pytest.raises(RunFailed, match=r"not finished in 0\.2 s; see .*client\.log"):
        wait_for(["sleep", "60"], os.environ, tmp_path / "client.log", 0.2)
    assert time.monotonic() - begun < 30


def test_a_server_that_does_not_come_up_is_stopped_and_a_taken_port_is_refused(tmp_path):
    log = tmp_path / "server.log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with (
            pytest.raises(RunFailed, match=r"the server of visit1-A was not up in 0\.3 s"),
            running_server(["sleep", "60"], os.environ, log, name="visit1-A", port=port, timeout_s=0.3),
        ):
            pass
        taken.listen()
        with (
            pytest.raises(RunFailed, match="something listens on port"),
            running_server(["sleep", "60"], os.environ, log, name="visit1-A", port=port, timeout_s=0.3),
        ):
            pass


def test_a_server_that_dies_at_start_is_a_failure_with_its_log(recipe):
    recipe.plan(speed={"piecewise": 1.0}, fail={"full": "start"})
    done = recipe("--no-transitions")
    assert done.returncode == 1
    assert "the server of visit2-B ended with 3 at start; see " in done.stderr
    assert "refuses this overlay" in (recipe.out / "visit2-B" / "server.log").read_text()


def test_resume_refuses_another_workload_and_a_second_start_refuses_the_folder(measured):
    same = ("--no-transitions", "--bench-args=--trust-remote-code")
    again = measured(*same)
    assert (again.returncode, "holds a comparison already; go on with --resume" in again.stderr) == (2, True)
    other = measured(*same, "--resume", "--num-prompts", "8")
    assert (other.returncode, "was begun with another load" in other.stderr) == (2, True)
    overlay = measured.folder / "full.yaml"
    text = overlay.read_text()
    overlay.write_text("base_config: other.yaml\n")
    changed = measured(*same, "--resume")
    overlay.write_text(text)
    assert (changed.returncode, "was begun with another arms" in changed.stderr) == (2, True)


def test_unequal_audio_is_noted(recipe):
    recipe.plan(speed={"piecewise": 1.0, "full": 1.25}, audio={"full": 4.5})
    done = recipe("--no-transitions", "--concurrency", "1")
    assert "C1: B spoke 0.900 times as much audio as A" in done.stdout


FEW_TRANSITIONS = "--transitions-args=--concurrency 3 --only solo,padded"


def test_the_outputs_are_compared_on_the_first_visit_to_either_server(recipe):
    done = recipe(FEW_TRANSITIONS, "--concurrency", "1", "--runs", "1", "--discard", "0")
    assert done.returncode == 0, done.stderr
    assert recipe.summary()["outputs_match"] is True
    assert "The outputs match in every transition." in done.stdout
    report = json.loads((recipe.out / "transitions-B" / "report.json").read_text())
    assert report["passed"]
    assert "recorded" in report["servers"]["baseline"]
    logs = sorted(path.parent.name for path in recipe.out.glob("visit*/transitions.log"))
    assert logs == ["visit1-A", "visit2-B"]


def test_outputs_that_differ_make_the_exit_code_1_and_keep_the_numbers(recipe):
    recipe.plan(speed={"piecewise": 1.0, "full": 1.25}, noise={"full": 50})
    done = recipe(FEW_TRANSITIONS, "--concurrency", "1", "--runs", "1", "--discard", "0")
    assert done.returncode == 1
    assert "note: the outputs were not shown to match" in done.stdout
    assert recipe.summary()["ratios"][0]["ratio"] == 1.25


def test_dry_run_prints_every_command_in_order_and_starts_nothing(recipe):
    done = recipe("--dry-run")
    assert done.returncode == 0, done.stderr
    assert not recipe.out.exists()
    assert not (recipe.folder / "calls.jsonl").exists()
    lines = [shlex.split(line) for line in done.stdout.splitlines() if line and not line.startswith("#")]
    serves = [Path(after(line, "--deploy-config")).stem for line in lines if "--deploy-config" in line]
    assert serves == ORDER
    assert sum("bench" in line for line in lines) == 4 * 2 * 3
    assert sum("transitions" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--concurrency", "1,1"), "different positive numbers"),
        (("--a", "absent.yaml"), "there is no deploy overlay absent.yaml"),
        (("--vllm", "no-such-vllm"), "there is no program 'no-such-vllm'"),
        (("--dataset", "absent"), "holds no en/meta.lst"),
        (("--runs", "0"), "'--runs'"),
        (("--num-prompts", "0"), "'--num-prompts'"),
    ],
)
def test_wrong_usage_is_exit_2(recipe, more, said):
    done = recipe("--dry-run", *more)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_reference_too_long_for_an_argument_is_refused_at_once(recipe):
    (recipe.folder / "reference.json").write_text(json.dumps({"ref_audio": "x" * 200_000, "ref_text": "t"}))
    done = recipe("--dry-run")
    assert done.returncode == 2
    assert "give codes (ref_audio_codes) instead of audio" in done.stderr


def chosen(monkeypatch, *arguments: str) -> modes.Options:
    """The options of a call, as the comparison takes them."""
    taken = []

    class Taken:
        def __init__(self, options: modes.Options) -> None:
            taken.append(options)

    with monkeypatch.context() as patch:
        patch.setattr(modes, "Comparison", Taken)
        patch.setattr(modes, "command_lines", lambda comparison: [])
        result = CliRunner().invoke(app, ["compare-modes", *arguments, "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return taken[0]


def test_the_shipped_overlays_are_the_default_arms(monkeypatch):
    options = chosen(monkeypatch, "--model", "m", "--dataset", "d", "--reference", "r", "--out", "o")
    assert options.a.name == "fish_omni_npu_piecewise.yaml"
    assert options.b.name == "fish_omni_npu_full.yaml"
    assert options.a.is_file()
    assert options.b.is_file()


def test_the_installed_client_takes_every_option(recipe):
    """Asks the real argument parser of ``vllm bench serve --omni``, in a process of its own."""
    lines = [line for line in recipe("--dry-run").stdout.splitlines() if " bench serve " in line]
    arguments = shlex.split(lines[0])[3:]
    code = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_omni.entrypoints.cli.benchmark.main import OmniBenchmarkSubcommand
import vllm_omni.entrypoints.cli.benchmark.serve
parser = FlexibleArgumentParser()
OmniBenchmarkSubcommand().subparser_init(parser.add_subparsers())
found = vars(parser.parse_args(["bench", "serve", *sys.argv[1:]]))
keys = ("omni", "backend", "dataset_name", "num_prompts", "max_concurrency", "num_warmups", "no_oversample",
        "disable_shuffle", "extra_body", "save_detailed", "result_filename", "percentile_metrics", "output_len")
print(json.dumps({key: found.get(key) for key in keys}))
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed["backend"] == "openai-audio-speech"
    assert parsed["dataset_name"] == "seed-tts-text"
    assert (parsed["num_prompts"], parsed["max_concurrency"], parsed["num_warmups"]) == (64, 1, 1)
    assert parsed["extra_body"]["ref_text"] == "it's said"
    assert all(parsed[flag] is True for flag in ("omni", "no_oversample", "disable_shuffle", "save_detailed"))


@pytest.mark.slow
def test_the_real_client_against_a_speech_endpoint_gives_every_metric(recipe, monkeypatch):
    """The client is the installed ``vllm bench serve --omni``; only the server is the fake."""
    texts = "".join(f"id{n}|said|prompt-wavs/a.wav|{'a sentence to say ' * (n + 1)}\n" for n in range(3))
    (recipe.folder / "data" / "en" / "meta.lst").write_text(texts)
    server = FakeSpeech()
    with serve(server) as url:
        options = chosen(
            monkeypatch,
            "--model", str(REPO / "tests" / "speech_server" / "model"), "--dataset", str(recipe.folder / "data"),
            "--reference", str(recipe.folder / "reference.json"), "--out", str(recipe.out), "--num-prompts", "3",
            "--a", str(recipe.folder / "piecewise.yaml"), "--b", str(recipe.folder / "full.yaml"),
            "--vllm", str(Path(sys.executable).parent / "vllm"), "--port", url.rpartition(":")[2],
            "--concurrency", "2", "--run-timeout", "300",
        )  # fmt: skip
        comparison = modes.Comparison(options)
        visit = comparison.visits[0]
        comparison.folder(visit).mkdir(parents=True)
        run = visit.runs[0]
        log = recipe.out / "client.log"
        command = comparison.bench_command(visit, run)
        assert wait_for(command, comparison.environment, log, options.run_timeout) == 0, log.read_text()
    result = ratios.read_result(comparison.folder(visit) / f"{run.stem}.json", 3)
    assert len(server.bodies) == 3 + 1  # one warm-up
    for body in server.bodies:
        assert (body["seed"], body["max_new_tokens"]) == (42, 500)
        assert body["ref_audio_codes"] == recipe.reference["ref_audio_codes"]
        assert "ref_audio" not in body
    spoken = sum(len(line.split("|")[3].strip()) for line in texts.splitlines()) * SAMPLES_PER_CHARACTER
    assert result[ratios.AUDIO_METRIC] == pytest.approx(spoken / RATE)
