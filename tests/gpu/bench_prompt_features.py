# SPDX-License-Identifier: Apache-2.0
"""Prompt features of one 6 s reference: stock against the items, idle and with work queued on the device.

    python -m tests.gpu.bench_prompt_features --out DIR [--rounds 6]

Arms alternate (A B B A ...) in one process on one machine. One discarded round, then ``--rounds`` measured ones.
Writes every row to DIR/prompt_features_<host>.csv and the summary to DIR/prompt_features_<host>.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from omni_speech_accel.host.source import host_info
from omni_speech_accel.measure.driver import PromptDriver, ready_platform
from omni_speech_accel.plugin.table import PATCHES
from omni_speech_accel.runtime import accelerator_for
from tests.gpu import harness

PROMPT_ITEMS = ("sync_free_prompt", "speaker_device", "speaker_graph", "speaker_stream", "s3_graph")
BACKLOG_MS = 100.0
# Frames of references of 4 to 6 s, none of them used before.
FIRST_LENGTHS = (604, 598, 560, 532, 506, 478, 450, 422)


def block(*keys: str) -> dict[str, bool]:
    return {patch.key: patch.key in keys for patch in PATCHES}


ARMS: dict[str, Any] = {
    "stock": None,
    "sync_free_prompt": block("sync_free_prompt"),
    "speaker_device": block("speaker_device"),
    "speaker_device+graph": block("speaker_device", "speaker_graph"),
    "speaker_device+stream": block("speaker_device", "speaker_stream"),
    "s3_graph": block("s3_graph"),
    "all": block(*PROMPT_ITEMS),
}


class Backlog:
    """Queues about ``BACKLOG_MS`` of device work on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cycles = 20_000_000
        for _ in range(2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
            self.cycles = int(cycles * BACKLOG_MS / start.elapsed_time(end))

    def queue(self) -> None:
        torch.cuda._sleep(self.cycles)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Host milliseconds until ``call`` returns, and until the device has finished too."""
    started = time.perf_counter()
    call()
    returned = time.perf_counter()
    accelerator_for(device).synchronize(device)
    return (returned - started) * 1e3, (time.perf_counter() - started) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    platform = ready_platform()
    model = harness.checkpoint()
    reference = reference_file(arguments.out)
    drivers = {name: PromptDriver(model, platform, block=value) for name, value in ARMS.items()}
    device = torch.empty(0, device=platform).device
    backlog = Backlog(device)
    rows: list[dict[str, Any]] = []
    prepare: dict[str, Callable[[], Any]] = {
        name: (lambda core=driver.core: core._prepare_prompt(reference)) for name, driver in drivers.items()
    }

    with torch.inference_mode():
        for name, call in prepare.items():  # first use: captures happen here
            host_ms, total_ms = timed(call, device)
            rows.append({"phase": "first use", "arm": name, "round": -1, "host_ms": host_ms, "total_ms": total_ms})
        for call in prepare.values():
            for _ in range(2):
                timed(call, device)
        for turn in range(-1, arguments.rounds):
            order = list(prepare) if turn % 2 else list(reversed(prepare))
            for name in order:
                host_ms, total_ms = timed(prepare[name], device)
                rows.append({"phase": "idle", "arm": name, "round": turn, "host_ms": host_ms, "total_ms": total_ms})
            for name in order:
                backlog.queue()
                host_ms, total_ms = timed(prepare[name], device)
                rows.append({"phase": "queued", "arm": name, "round": turn, "host_ms": host_ms, "total_ms": total_ms})
        rows += stages(drivers, device, reference, arguments.rounds)
        parity = compare(drivers, reference)
        first = first_lengths(drivers["all"], device)
        syncs = host_syncs(drivers["all"], reference)

    summary = {
        "host": str(host_info()),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "command": sys.argv,
        "medians_ms": medians(rows),
        "parity_all_to_stock": parity,
        "first_use_of_a_new_length": first,
        "synchronising_calls_in_prepare_prompt": syncs,
        "counters": {name: driver.session.snapshot() for name, driver in drivers.items()},
    }
    stem = arguments.out / f"prompt_features_{host_info().version}"
    with open(f"{stem}.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, ["phase", "arm", "round", "host_ms", "total_ms"])
        writer.writeheader()
        writer.writerows(rows)
    Path(f"{stem}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "counters"}, indent=1))
    return 0


def reference_file(folder: Path) -> str:
    """Six seconds of real speech."""
    from omni_speech_accel.synthetic.references import reference_wavs

    return str(reference_wavs(folder / "references")[0])


def stages(drivers: dict[str, PromptDriver], device: torch.device, reference: str, rounds: int) -> list[dict[str, Any]]:
    """CAM++ and S3 quantize alone: stock, eager on the device, and as a replay."""
    features = torch.randn(598, 80)
    mel = torch.randn(1, 128, 600, device=device)
    lengths = torch.tensor([600], dtype=torch.int32, device=device)
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("CAM++", "stock"): lambda: drivers["stock"].core._forward_spk_embedding(features),
        ("CAM++", "eager"): lambda: drivers["speaker_device"].core._forward_spk_embedding(features),
        ("CAM++", "graph"): lambda: drivers["speaker_device+graph"].core._forward_spk_embedding(features),
        ("CAM++", "all"): lambda: drivers["all"].core._forward_spk_embedding(features),
        ("S3 quantize", "stock"): lambda: drivers["stock"].core.audio_tokenizer.quantize(mel, lengths),
        ("S3 quantize", "eager"): lambda: drivers["sync_free_prompt"].core.audio_tokenizer.quantize(mel, lengths),
        ("S3 quantize", "graph"): lambda: drivers["s3_graph"].core.audio_tokenizer.quantize(mel, lengths),
    }
    for call in calls.values():
        for _ in range(3):
            timed(call, device)
    rows = []
    for turn in range(-1, rounds):
        for phase, arm in list(calls) if turn % 2 else list(reversed(calls)):
            host_ms, total_ms = timed(calls[phase, arm], device)
            rows.append({"phase": phase, "arm": arm, "round": turn, "host_ms": host_ms, "total_ms": total_ms})
    return rows


def compare(drivers: dict[str, PromptDriver], reference: str) -> dict[str, Any]:
    """The features of ``all`` against stock's."""
    on, stock = (drivers[name].features(Path(reference)) for name in ("all", "stock"))
    result: dict[str, Any] = {}
    for name, value in stock.items():
        same = (on[name].dtype, on[name].shape, on[name].device) == (value.dtype, value.shape, value.device)
        difference = (on[name].double() - value.double()).norm() / value.double().norm()
        result[name] = {
            "layout": same,
            "equal": bool(torch.equal(on[name], value)),
            "differing": int((on[name] != value).sum()),
            "relative": float(difference),
        }
    result["cosine"] = float(torch.cosine_similarity(on["speaker embedding"], stock["speaker embedding"]))
    return result


def first_lengths(driver: PromptDriver, device: torch.device) -> dict[str, Any]:
    """What the first use of a length costs beside the eager path, and that it does not wait for another stream.

    ``over_eager``: (first use - the recording alone) / eager, until the host goes on and until the device is done. The
    host pays one eager run; the device also has the first replay, which shows that the graph works before it is kept.
    """
    from omni_speech_accel.items import speaker_graph  # the item's own cache, with room for these lengths
    from omni_speech_accel.runtime import GraphCache, accelerator_for

    model = driver.core.spk_model
    accelerator = accelerator_for(device)
    cache = GraphCache("bench", accelerator, device, len(FIRST_LENGTHS) + 1)
    recording = accelerator.create_stream(device)
    rows: list[dict[str, float]] = []
    for frames in FIRST_LENGTHS:
        features = torch.randn(frames, 80, device=device)
        eager = [timed(lambda features=features: model(features), device) for _ in range(6)][1:]
        alone = []
        for _ in range(3):
            _, capture = timed(
                lambda features=features: accelerator.capture(
                    lambda: model(features), device, stream=recording, warmups=0
                ),
                device,
            )
            alone.append(capture)
        first = timed(lambda features=features, frames=frames: cache.run(frames, model, features), device)
        replay = timed(lambda features=features, frames=frames: cache.run(frames, model, features), device)
        row = {"frames": frames, "recording_ms": statistics.median(alone), "replay_ms": replay[1]}
        for index, until in enumerate(("host", "device")):
            row[f"eager_{until}_ms"] = statistics.median(times[index] for times in eager)
            row[f"first_{until}_ms"] = first[index]
            row[f"over_eager_{until}"] = (first[index] - row["recording_ms"]) / row[f"eager_{until}_ms"]
        rows.append({name: round(value, 3) for name, value in row.items()})
    result: dict[str, Any] = {"item": speaker_graph.KEY, "lengths": rows}
    # The first capture of a process makes handles and has a warm-up more; it is reported, and not in the medians.
    for name in rows[0]:
        if name != "frames":
            result[f"median_{name}"] = round(statistics.median(row[name] for row in rows[1:]), 3)
    busy = torch.cuda.Stream()
    features = torch.randn(606, 80, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
        done = torch.cuda.Event()
        done.record()
    started = time.perf_counter()
    cache.run(606, model, features)
    result["capture_beside_a_busy_stream_ms"] = (time.perf_counter() - started) * 1e3
    result["busy_stream_still_running_after_the_capture"] = not done.query()
    torch.cuda.synchronize()
    return result


def host_syncs(driver: PromptDriver, reference: str) -> list[str]:
    """Synchronising calls that torch sees in one warm ``_prepare_prompt``; the first ends the call."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        driver.core._prepare_prompt(reference)
    except RuntimeError as error:
        import traceback

        return [str(error), traceback.format_exc()[-1500:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["round"] >= 0 or row["phase"] == "first use":
            groups.setdefault((row["phase"], row["arm"]), []).append(row)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for (phase, arm), found in groups.items():
        entry = {}
        for field in ("host_ms", "total_ms"):
            values = [row[field] for row in found]
            entry[field] = round(statistics.median(values), 2)
            entry[f"{field}_min"] = round(min(values), 2)
            entry[f"{field}_max"] = round(max(values), 2)
        result.setdefault(phase, {})[arm] = entry
    return result


if __name__ == "__main__":
    sys.exit(main())
