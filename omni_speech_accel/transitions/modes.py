# SPDX-License-Identifier: Apache-2.0
"""Two deploy overlays of one model, matched: which server is started when, with which runs, and what is kept of them.

The servers are visited in the order A B B A and driven with the host's own client; per server start and concurrency
some runs are discarded before the measured ones. The first visit to either server also compares what they say.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_speech_accel.transitions import CannotCompare
from omni_speech_accel.transitions.machine import devices, kept_variables, python_beside, versions
from omni_speech_accel.transitions.processes import RunFailed, running_server, wait_for
from omni_speech_accel.transitions.ratios import METRICS, notes, ratios, read_result, table

ORDER = "ABBA"
LOAD = ("concurrency", "num_prompts", "max_tokens", "num_warmups", "discard", "runs", "locale", "seed")

# Linux: MAX_ARG_STRLEN, the longest single argument of a program. The client takes the body as an argument.
MAX_ARGUMENT_BYTES = 128 * 1024 - 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``compare-modes``, by their names there."""

    model: str
    dataset: Path
    reference: Path
    out: Path
    a: Path
    b: Path
    concurrency: str
    num_prompts: int
    max_tokens: int
    num_warmups: int
    discard: int
    runs: int
    locale: str
    seed: int
    no_transitions: bool
    transitions_args: str
    vllm: str
    port: int
    serve_args: str
    bench_args: str
    startup_timeout: float
    run_timeout: float


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


class Comparison:
    """The whole comparison: what is to be run, and where its results are kept."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.out = options.out.resolve()
        self.overlays = {"A": options.a.resolve(), "B": options.b.resolve()}
        for arm, overlay in (("A", options.a), ("B", options.b)):
            if not overlay.is_file():
                raise CannotCompare(f"there is no deploy overlay {overlay} (arm {arm})")
        if self.overlays["A"] == self.overlays["B"]:
            raise CannotCompare("--a and --b are the same file")
        if not (options.dataset / options.locale / "meta.lst").is_file():
            raise CannotCompare(f"--dataset {options.dataset} holds no {options.locale}/meta.lst")
        self.body = {**_read_reference(options.reference), "max_new_tokens": options.max_tokens}
        found = shutil.which(options.vllm)
        if found is None:
            raise CannotCompare(f"there is no program {options.vllm!r}; activate the host's environment or give --vllm")
        self.vllm = found
        self.python = python_beside(Path(found))
        self.url = f"http://127.0.0.1:{options.port}"
        self.visits = plan_visits(_numbers(options.concurrency), options.discard, options.runs)
        self.environment = dict(os.environ)
        self.versions = versions(self.python)
        self._set_deploy_folder()
        if not options.no_transitions and not self.versions["runs_transitions"]:
            raise CannotCompare(
                f"{self.python} cannot run the comparison of outputs: pip install 'omni-speech-accel[bench]' there, or "
                "leave it out with --no-transitions"
            )

    def _set_deploy_folder(self) -> None:
        # The overlays name the host's stock YAML through this variable.
        location = self.versions.get("vllm_omni_location")
        if "OMNI_DEPLOY_DIR" not in self.environment and location:
            self.environment["OMNI_DEPLOY_DIR"] = str(Path(location) / "deploy")
        wanted = any("OMNI_DEPLOY_DIR" in path.read_text(encoding="utf-8") for path in self.overlays.values())
        if wanted and "OMNI_DEPLOY_DIR" not in self.environment:
            raise CannotCompare(f"OMNI_DEPLOY_DIR is not set, and {self.python} does not find vllm_omni to set it from")

    def serve_command(self, visit: Visit) -> list[str]:
        options = self.options
        return [
            self.vllm, "serve", options.model, "--omni", "--deploy-config", str(self.overlays[visit.arm]),
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
                arm: {"overlay": str(path), "text": path.read_text(encoding="utf-8")}
                for arm, path in self.overlays.items()
            },
            "model": options.model,
            "dataset": str(options.dataset),
            "dataset_sha256": _sha256(options.dataset / options.locale / "meta.lst"),
            "request_fields": self.body,
            "load": {name: getattr(options, name) for name in LOAD},
            "serve_args": options.serve_args,
            "bench_args": options.bench_args,
            "versions": self.versions,
        }


def plan_visits(concurrencies: Sequence[int], discard: int, measured: int) -> tuple[Visit, ...]:
    """The visits in order: A B B A, so that a drift of the machine falls on both arms alike."""
    labels = [f"discard{n + 1}" for n in range(discard)] + [f"run{n + 1}" for n in range(measured)]
    runs = tuple(Run(concurrency, label) for concurrency in concurrencies for label in labels)
    return tuple(Visit(number, arm, runs) for number, arm in enumerate(ORDER, 1))


def run(comparison: Comparison, commit: str | None, resume: bool) -> dict[str, Any]:
    """Run every visit that is not done yet; the summary of all. `commit`: of the checkout that this is, to be kept.

    Raises:
        CannotCompare: The folder holds something else, or with `resume` a comparison of other things.
        RunFailed: A server or a client failed; what was done before is kept.
    """
    _open_folder(comparison, commit, resume)
    for visit in comparison.visits:
        if (comparison.folder(visit) / "visit.json").is_file():
            _say(f"{visit.name}: done earlier")
        else:
            _perform(comparison, visit)
    return _summarize(comparison)


def command_lines(comparison: Comparison) -> list[str]:
    """Every command that a real run starts, in order, ready for a shell."""
    deploys = comparison.environment.get("OMNI_DEPLOY_DIR")
    lines = [f"export OMNI_DEPLOY_DIR={shlex.quote(deploys)}"] if deploys else []
    for visit in comparison.visits:
        transitions = comparison.transitions_command(visit)
        lines += [
            f"\n# {visit.name}: start, wait until {comparison.url}/health answers, run these, stop",
            shlex.join(comparison.serve_command(visit)) + " &",
            *(shlex.join(comparison.bench_command(visit, run)) for run in visit.runs),
            *([shlex.join(transitions)] if transitions else []),
        ]
    return lines


def _open_folder(comparison: Comparison, commit: str | None, resume: bool) -> None:
    """Make the folder of the comparison, or take up the one that an earlier call has left."""
    out, manifest = comparison.out, comparison.manifest()
    path = out / "manifest.json"
    if path.is_file():
        if not resume:
            raise CannotCompare(f"{out} holds a comparison already; go on with --resume, or give another --out")
        earlier = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(key for key in manifest if earlier.get(key) != json.loads(json.dumps(manifest[key])))
        if changed:
            raise CannotCompare(f"{out} was begun with another {', '.join(changed)}; the halves do not compare")
    elif out.exists() and any(out.iterdir()):
        raise CannotCompare(f"{out} is not empty and holds no comparison")
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "request_fields.json", comparison.body)
    if not path.is_file():
        kept = {"commit": commit, "device": devices(), "environment": kept_variables(comparison.environment)}
        _write_json(path, {**manifest, **kept})
    for visit in comparison.visits:
        folder = comparison.folder(visit)
        # Half a visit is no visit: its later runs would meet a server that was warmed up in another way.
        if folder.exists() and not (folder / "visit.json").is_file():
            number = next(n for n in range(1, 1000) if not (out / f"{folder.name}.aborted{n}").exists())
            folder.rename(out / f"{folder.name}.aborted{number}")


def _perform(comparison: Comparison, visit: Visit) -> None:
    """Start the server of a visit, run the client against it, stop it. Raises `RunFailed`."""
    options, folder = comparison.options, comparison.folder(visit)
    folder.mkdir()
    started = time.time()
    rows = []
    transitions_code: int | None = None
    _say(f"{visit.name}: starting the server ({comparison.overlays[visit.arm].stem})")
    with running_server(
        comparison.serve_command(visit), comparison.environment, folder / "server.log", name=visit.name,
        port=options.port, timeout_s=options.startup_timeout,
    ) as startup_s:  # fmt: skip
        for run in visit.runs:
            _say(f"{visit.name}: {run.stem}")
            load_before, begun, log = os.getloadavg()[0], time.monotonic(), folder / f"{run.stem}.log"
            command = comparison.bench_command(visit, run)
            if code := wait_for(command, comparison.environment, log, options.run_timeout):
                raise RunFailed(f"the client run {run.stem} ended with {code}; see {log}")
            wall = time.monotonic() - begun
            result = read_result(folder / f"{run.stem}.json", options.num_prompts)
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
        transitions = comparison.transitions_command(visit)
        if transitions:
            _say(f"{visit.name}: transitions")
            log = folder / "transitions.log"
            transitions_code = wait_for(transitions, comparison.environment, log, options.run_timeout)
            if transitions_code not in (0, 1):
                raise RunFailed(f"transitions ended with {transitions_code}; see {log}")
    _write_json(
        folder / "visit.json",
        {
            "visit": visit.number,
            "arm": visit.arm,
            "started": started,
            "startup_s": round(startup_s, 1),
            "commands": {
                "serve": comparison.serve_command(visit),
                "transitions": transitions,
                **{run.stem: comparison.bench_command(visit, run) for run in visit.runs},
            },
            "graph_modes_in_log": _graph_modes(folder / "server.log"),
            "transitions_exit_code": transitions_code,
            "rows": rows,
        },
    )


def _summarize(comparison: Comparison) -> dict[str, Any]:
    """Gather every visit into rows.csv and summary.{json,csv,txt}; returns the summary."""
    visits = [
        json.loads((comparison.folder(visit) / "visit.json").read_text(encoding="utf-8")) for visit in comparison.visits
    ]
    rows = [row for visit in visits for row in visit["rows"]]
    _write_csv(comparison.out / "rows.csv", rows)
    codes = [visit["transitions_exit_code"] for visit in visits if visit["transitions_exit_code"] is not None]
    summary: dict[str, Any] = {
        "arms": {arm: path.stem for arm, path in comparison.overlays.items()},
        "order": ORDER,
        "graph_modes_in_log": {f"visit{v['visit']}-{v['arm']}": v["graph_modes_in_log"] for v in visits},
        "outputs_match": None if not codes else not any(codes),
        "ratios": ratios([row for row in rows if row["measured"]]),
    }
    summary["notes"] = notes(summary)
    summary["table"] = table(summary)
    _write_csv(comparison.out / "summary.csv", summary["ratios"])
    _write_json(comparison.out / "summary.json", summary)
    (comparison.out / "summary.txt").write_text(summary["table"] + "\n", encoding="utf-8")
    return summary


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise CannotCompare(f"--concurrency takes different positive numbers such as 1,16,32,64, got {text!r}")
    return numbers


def _read_reference(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotCompare(f"--reference {path}: {error}") from error
    if not isinstance(fields, dict):
        raise CannotCompare(f"--reference {path} must hold a JSON object of request fields")
    if len(json.dumps(fields)) > MAX_ARGUMENT_BYTES - 1024:
        raise CannotCompare(
            f"--reference {path} is too long to hand to the client, which takes it as one argument of at most "
            f"{MAX_ARGUMENT_BYTES} bytes: give codes (ref_audio_codes) instead of audio"
        )
    return fields


def _graph_modes(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return sorted(set(re.findall(r"cudagraph_mode\W+(?:CUDAGraphMode\.)?([A-Z][A-Z_]+)", text)))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
