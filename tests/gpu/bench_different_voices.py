# SPDX-License-Identifier: Apache-2.0
"""Measure different voices together on a real device: each item against stock, in one run, arms in ABBA order.

    python tests/gpu/bench_different_voices.py HOST --out DIR

HOST is the version of vllm-omni that must be installed, so that a row never carries the wrong host's name. DIR gets
``different_voices-HOST.json`` (everything), ``.csv`` (one line per timed run) and ``.txt`` (the table that is printed).
About four minutes on an H200, of which the host's own precapture of three stages is half.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from omni_speech_accel.items import _reference_groups as groups  # noqa: E402
from omni_speech_accel.items import cold_reference_batch  # noqa: E402
from omni_speech_accel.measure.driver import Code2WavDriver, ready_platform  # noqa: E402
from omni_speech_accel.measure.made_on import commit  # noqa: E402
from omni_speech_accel.synthetic.references import Reference, distinct_references  # noqa: E402
from tests.gpu import different_voices as voices  # noqa: E402
from tests.gpu import harness  # noqa: E402

STEADY_AFTER = 4  # chunks until a stream's attention cache has its steady length, one spare
ROUNDS = 4  # ABBA rounds per measure: eight timed runs per arm, after one discarded round


@dataclass(frozen=True)
class Row:
    """One timed run."""

    measure: str
    rows: int
    arm: str
    round: int
    discarded: bool
    ms: float


@dataclass(frozen=True)
class Memory:
    """One cold setup of ``rows`` references, in MiB above what was allocated before: its peak, and what it leaves.

    ``formula_mib``: what it leaves, and per reference of one solve an attention cache over all steps and six of one.
    """

    arm: str
    rows: int
    peak_mib: float
    kept_mib: float
    formula_mib: float


@dataclass(frozen=True)
class Error:
    """Relative error of a state against the host's own of one reference (see ``state_error``)."""

    measure: str
    rows: int
    relative: float


class Bench:
    """The measuring of one host. ``arms``: stages by name, ``stock`` among them."""

    def __init__(self, arms: dict[str, Code2WavDriver], references: Sequence[Reference]) -> None:
        self.arms = arms
        self.references = references
        self.rows: list[Row] = []
        self.memory: list[Memory] = []
        self.errors: list[Error] = []

    def _abba(self, arm: str, measure: str, count: int, runs: dict[str, Callable[[], Any]]) -> None:
        for round_ in range(ROUNDS + 1):
            for name in ("stock", arm, arm, "stock"):
                driver = self.arms[name]
                driver.synchronize()
                started = time.perf_counter()
                runs[name]()
                driver.synchronize()
                elapsed = 1e3 * (time.perf_counter() - started)
                self.rows.append(Row(measure, count, name, round_, round_ == 0, elapsed))

    def cold(self, counts: Sequence[int]) -> None:
        """Setup of distinct cold references whose features are ready, by the calls that the stage makes."""
        for count in counts:
            runs = {}
            for name in ("stock", "cold"):
                driver = self.arms[name]
                items = voices.starting_items(driver, self.references[:count], f"cold{count}-")
                for _ in range(3):  # first: the encoder settles; second: its graph; third: nothing new
                    voices.cold_setups(driver, items)
                runs[name] = lambda driver=driver, items=items: voices.cold_setups(driver, items)
            self._abba("cold", "cold setup", count, runs)
            self._peak(count, runs)

    def _peak(self, count: int, runs: dict[str, Callable[[], Any]]) -> None:
        features = self._features("cold")
        cold = self.arms["cold"]
        kept, one_step = groups.attention_cache_bytes(cold.backend, int(features.mels.shape[1]))
        item = cold.session.item(cold_reference_batch.KEY)
        together = min(count, cold_reference_batch.solve_together(item, cold.backend, features))
        for name, run in runs.items():
            device = self.arms[name].device
            self.arms[name].backend._setup_cache.clear()
            torch.accelerator.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            states = run()
            peak, left = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
            del states
            formula = left + (together if name == "cold" else 1) * (kept + 6 * one_step)
            self.memory.append(Memory(name, count, peak / 2**20, left / 2**20, formula / 2**20))

    def _features(self, arm: str, index: int = 0) -> Any:
        item = voices.starting_items(self.arms[arm], self.references[index : index + 1], "features-")[0]
        return self.arms[arm].backend.prepare_prompt(item.prompt_cache_id, item.prompt_wav)

    def cold_errors(self, counts: Sequence[int]) -> None:
        """States of a group against each alone, and the host's own spread over batch sizes beside it."""
        alone = voices.cold_setups(
            self.arms["stock"], voices.starting_items(self.arms["stock"], self.references, "error-")
        )
        items = voices.starting_items(self.arms["cold"], self.references, "error-")
        for count in counts:
            found = voices.cold_setups(self.arms["cold"], items[:count])
            worst = max(voices.state_error(mine, theirs) for mine, theirs in zip(found, alone, strict=False))
            self.errors.append(Error("group against alone", count, worst))
            with voices.serving(self.arms["stock"]):
                many = self.arms["stock"].backend._create_initial_states(self._features("stock"), count)
            spread = max(voices.state_error(state, alone[0]) for state in many)
            self.errors.append(Error("host, one reference in a batch", count, spread))
            del found, many

    def steady(self, count: int, *, same: bool) -> None:
        """A steady chunk of ``count`` streams through the stage's forward."""
        references = [self.references[0 if same else index] for index in range(count)]
        chunks = STEADY_AFTER + 2 * (ROUNDS + 1)
        measure = "steady chunk, same voice" if same else "steady chunk, different voices"
        runs, streams, last = {}, [], {}
        for name in ("stock", "cross"):
            driver = self.arms[name]
            running = voices.RunningStreams(driver, references, f"{'same' if same else 'diff'}{count}-", chunks)
            for _ in range(STEADY_AFTER):
                driver.step(running.chunk())
            streams.append(running)
            runs[name] = lambda driver=driver, running=running, name=name: last.update(
                {name: driver.step(running.chunk())}
            )
        self._abba("cross", measure, count, runs)
        states = [self.arms[name].model._states for name in ("cross", "stock")]
        error = max(
            voices.state_error(states[0][stream].token2wav, states[1][stream].token2wav) for stream in streams[0].names
        )
        self.errors.append(Error(f"{measure}: states after {chunks} chunks, cross against stock", count, error))
        for running in streams:
            running.finish()

    def report(self, host: str) -> dict[str, Any]:
        """Everything that was measured, JSON-serialisable."""
        return {
            "host": host,
            "commit": commit() or "unknown",  # where the tree travelled without its history
            "command": " ".join(sys.argv),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "profile": self.arms["stock"].profile.source,
            "items": {name: driver.session.describe() for name, driver in self.arms.items()},
            "counters": {name: driver.session.snapshot() for name, driver in self.arms.items()},
            "graphs": {name: graph_stats(driver) for name, driver in self.arms.items()},
            "rows": [asdict(row) for row in self.rows],
            "memory": [asdict(row) for row in self.memory],
            "errors": [asdict(row) for row in self.errors],
        }


def graph_stats(driver: Code2WavDriver) -> dict[str, Any]:
    """Telemetry of the host's graph wrappers."""
    found = {}
    for name in ("_whole_euler_graph_wrapper", "_cfm_graph_wrapper"):
        wrapper = getattr(driver.backend, name, None)
        if wrapper is not None:
            found[name] = wrapper.stats_snapshot()
    return found


def table(report: dict[str, Any]) -> Iterator[str]:
    """The report for reading: medians with min and max, and the ratio of the medians."""
    yield f"vllm-omni {report['host']}, {report['device']}, torch {report['torch']}, {report['profile']}"
    yield f"{'measure':34}{'rows':>5}{'stock ms':>26}{'item ms':>26}{'ratio':>8}"
    kept = [row for row in report["rows"] if not row["discarded"]]
    for measure, rows in dict.fromkeys((row["measure"], row["rows"]) for row in kept):
        medians, cells = {}, {}
        for row in kept:
            if (row["measure"], row["rows"]) == (measure, rows):
                cells.setdefault("stock" if row["arm"] == "stock" else "item", []).append(row["ms"])
        text = {}
        for side, values in cells.items():
            medians[side] = statistics.median(values)
            text[side] = f"{medians[side]:.1f} ({min(values):.1f}-{max(values):.1f})"
        ratio = medians["stock"] / medians["item"]
        yield f"{measure:34}{rows:>5}{text['stock']:>26}{text['item']:>26}{ratio:>7.2f}x"
    yield ""
    yield f"{'memory of a cold setup':34}{'rows':>5}{'peak MiB':>12}{'kept MiB':>12}{'formula MiB':>14}"
    for row in report["memory"]:
        sizes = f"{row['peak_mib']:>12.0f}{row['kept_mib']:>12.0f}{row['formula_mib']:>14.0f}"
        yield f"{row['arm']:34}{row['rows']:>5}{sizes}"
    yield ""
    for row in report["errors"]:
        yield f"{row['measure']:70}{row['rows']:>5}{row['relative']:>12.2e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", help="version of vllm-omni that is installed")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    installed = metadata.version("vllm-omni")
    if installed != arguments.host:
        parser.error(f"vllm-omni {installed} is installed here, not {arguments.host}")
    ready_platform("cuda")
    model = harness.checkpoint()
    profile = harness.profile_with("cuda", {"token2wav_runtime_prompt_cache_size": 16, "token2wav_setup_cache_size": 1})
    blocks = {
        "stock": None,
        "cold": voices.only("cold_reference_batch", "cold_setup_precapture"),
        "cross": voices.only("cross_reference_decode"),
    }
    started = time.perf_counter()
    arms = {name: Code2WavDriver(model, profile, block=block) for name, block in blocks.items()}
    references = distinct_references(8, voices.REFERENCE_SECONDS)
    for driver in arms.values():  # the first forward captures the host's graphs
        warm = voices.RunningStreams(driver, references[:1], "warm", 3)
        for _ in range(3):
            driver.step(warm.chunk())
        warm.finish()
    print(f"three stages stand after {time.perf_counter() - started:.0f} s", flush=True)
    bench = Bench(arms, references)
    for part in (
        lambda: bench.cold((1, 2, 4, 8)),
        lambda: bench.cold_errors((2, 4, 8)),
        lambda: bench.steady(8, same=False),
        lambda: bench.steady(8, same=True),
        lambda: bench.steady(4, same=False),
    ):
        part()
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
    report = bench.report(installed)
    lines = list(table(report))
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"different_voices-{installed}"
    stem.with_name(stem.name + ".json").write_text(json.dumps(report, indent=1))
    stem.with_name(stem.name + ".txt").write_text("\n".join(lines) + "\n")
    with stem.with_name(stem.name + ".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["host", *Row.__dataclass_fields__])
        writer.writeheader()
        writer.writerows({"host": installed, **row} for row in report["rows"])
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
