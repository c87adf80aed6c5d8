# SPDX-License-Identifier: Apache-2.0
"""One real, tiny run of the bench on the stock host, and what is made of it."""

from __future__ import annotations

import builtins
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile

from omni_speech_accel.cli.tables import print_bench
from omni_speech_accel.errors import ReferenceMixup, RunError, Unavailable, UsageError
from omni_speech_accel.host import source as host
from omni_speech_accel.measure import bench as runner
from omni_speech_accel.measure import report_files as files
from omni_speech_accel.measure.abba import PHASES
from omni_speech_accel.measure.bench import STOCK, Arm, BenchReport, item_arms, run
from omni_speech_accel.measure.driver import Code2WavDriver
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.measure.workload import Workload
from omni_speech_accel.plugin.table import PATCHES

Run = tuple[BenchReport, runner.Waveforms, list[str]]
WORK = Workload(streams=2, chunks=3, repeats=1)
KEYS = [patch.key for patch in PATCHES]
ITEM = Arm("sync_free_prompt", {key: key == "sync_free_prompt" for key in KEYS})


@pytest.fixture(scope="module")
def made(platform: str, profile: StageProfile, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    seen: list[str] = []
    report, waveforms = run(
        [Arm(STOCK), ITEM],
        small_checkpoint,
        profile,
        WORK,
        platform,
        tmp_path_factory.mktemp("bench"),
        arguments=["bench", "--streams", "2"],
        progress=lambda what, done, total: seen.append(f"{done}/{total} {what}"),
    )
    return report, waveforms, seen


def test_passes_alternate_and_every_call_is_kept(made: Run) -> None:
    rows = made[0].rows
    order = [row.arm for row in rows if row.phase == "first_chunk"]
    assert order == [STOCK, ITEM.name, STOCK, ITEM.name, ITEM.name, STOCK]
    assert [row.kind for row in rows if row.phase == "first_chunk"] == ["warm-up"] * 2 + ["discarded"] * 2 + [
        "measured"
    ] * 2
    per_pass = {"prompt_features": 2, "first_chunk": 1, "steady_chunk": 1, "last_chunk": 1}
    for phase, count in per_pass.items():
        assert sum(row.phase == phase for row in rows) == 6 * count
    assert all(row.seconds > 0.0 for row in rows)


def test_summaries_are_of_measured_calls_only(made: Run) -> None:
    report = made[0]
    for summary in report.summaries:
        own = [
            row.seconds
            for row in report.rows
            if row.kind == "measured" and row.arm == summary.arm and row.phase == summary.phase
        ]
        assert (summary.count, summary.min_ms) == (len(own), pytest.approx(min(own) * 1e3))
    assert {summary.phase for summary in report.summaries} == set(PHASES)
    assert all((summary.speedup is None) is (summary.arm == STOCK) for summary in report.summaries)


def test_arms_made_the_same_audio_and_the_item_acted_in_its_arm_alone(made: Run) -> None:
    report, waveforms, _ = made
    stock, item = report.arms
    assert item.audio_ratio == 1.0
    assert report.comparable
    assert report.ok
    assert (stock.on, item.on) == ((), ("sync_free_prompt",))
    assert item.counters["sync_free_prompt"]["calls"] > 0
    assert stock.counters == {}
    assert waveforms[STOCK].equal(waveforms[ITEM.name])
    # Both streams make three chunks of 5 frames at 25 per second, and the first chunk's context of 3.
    assert item.audio_seconds == pytest.approx(2 * (15 + 3) / 25, rel=0.01)


def test_report_says_what_it_was_made_with(made: Run) -> None:
    found = json.loads(made[0].as_json())
    assert found["schema"] == "omni_speech_accel.bench/1"
    assert found["command"] == "omni-speech-accel bench --streams 2"
    assert found["host"] == str(host.host_info())
    assert found["workload"] == {"streams": 2, "chunks": 3, "repeats": 1, "seed": 0}
    assert found["extra"]["token2wav_n_timesteps"] == 2
    assert set(found["rows"][0]) == {
        "pair", "arm", "number", "kind", "phase", "index", "streams", "seconds", "audio_seconds",
    }  # fmt: skip
    assert {"version", "python", "torch", "commit", "device", "platform", "baseline", "comparable"} <= set(found)


def test_progress_counts_to_its_total(made: Run) -> None:
    counts = [line.split()[0].split("/") for line in made[2]]
    assert {total for _, total in counts} == {"8"}
    assert [int(done) for done, _ in counts] == list(range(8))


def test_no_file_of_an_earlier_run_passes_for_one_of_this(made: Run, tmp_path: Path) -> None:
    report, waveforms, _ = made
    (tmp_path / "bench.json").write_text('{"arms": [{"name": "s3_graph"}]}')
    for name in ("s3_graph.wav", "mine.wav"):
        (tmp_path / name).touch()
    names = files.write_all(tmp_path, report, waveforms)
    assert {path.name for path in tmp_path.iterdir()} - {"mine.wav"} == set(names) - {files.PLOT_HINT}
    assert (tmp_path / "mine.wav").exists()


def test_files_hold_the_rows_the_plot_and_a_wav_per_arm(made: Run, tmp_path: Path) -> None:
    report, waveforms, _ = made
    names = files.write_all(tmp_path, report, waveforms)
    assert names == ["bench.json", "bench.csv", "bench.png", "stock.wav", "sync_free_prompt.wav"]
    with (tmp_path / "bench.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(report.rows)
    assert float(rows[-1]["seconds"]) == report.rows[-1].seconds
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    audio, rate = soundfile.read(tmp_path / "stock.wav")
    assert (rate, len(audio)) == (24000, waveforms[STOCK].numel())
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(report.as_json())


def test_without_matplotlib_everything_but_the_plot_is_written(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    names = files.write_all(tmp_path, made[0], made[1])
    assert files.PLOT_HINT in names
    assert not (tmp_path / "bench.png").exists()
    assert (tmp_path / "bench.csv").exists()


def test_a_run_that_is_stopped_reports_the_arms_that_were_done(
    platform: str, profile: StageProfile, small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the second item's first pass, as `timeout` sends it through SIGTERM."""
    from rich.console import Console

    second = replace(ITEM, name="second")

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith("second: warm-up pass of second"):
            raise KeyboardInterrupt

    report, waveforms = run(
        [Arm(STOCK), ITEM, second], small_checkpoint, profile, replace(WORK, streams=1), platform, tmp_path,
        progress=progress,
    )  # fmt: skip
    assert (report.unmeasured, report.ok, report.comparable) == (("second",), False, True)
    assert [arm.name for arm in report.arms] == [STOCK, ITEM.name] == list(waveforms)
    assert {row.pair for row in report.rows} == {ITEM.name}
    print_bench(report, Console(width=80))
    assert "Stopped before these were measured: second" in capsys.readouterr().out


def test_a_run_that_is_stopped_before_one_arm_is_done_has_nothing_to_report(
    platform: str, profile: StageProfile, small_checkpoint: Path, tmp_path: Path
) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what.startswith(f"building {ITEM.name}"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([Arm(STOCK), ITEM], small_checkpoint, profile, WORK, platform, tmp_path, progress=progress)


def test_table_shows_every_arm_of_every_phase(made: Run, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    print_bench(made[0], Console(width=80))
    shown = capsys.readouterr().out
    assert shown.count("sync_free_prompt") == 5
    assert "no block" in shown
    assert shown.count("stock ms") == 4


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_number_of_the_table_is_cut_on_a_narrow_terminal(
    made: Run, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    long = "cold_reference_batch + cold_setup_precapture"
    report = made[0]
    slow = {"median_ms": 101366.4, "min_ms": 10234.5, "max_ms": 987654.3}
    summaries = tuple(
        row if row.arm == STOCK else replace(row, arm=long, speedup=12.34, **slow) for row in report.summaries
    )
    arms = tuple(arm if arm.name == STOCK else replace(arm, name=long, on=tuple(KEYS)) for arm in report.arms)
    print_bench(replace(report, summaries=summaries, arms=arms), Console(width=width))
    shown = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for number in ("101366.4", "10234.5", "987654.3", "12.34x"):
        assert shown.count(number) == len(PHASES), number
    assert f"{arms[1].realtime:.2f}" in shown
    assert f"{arms[1].audio_seconds:.1f}" in shown
    assert max(map(len, shown.splitlines())) <= width


def test_a_baseline_with_items_on_is_no_baseline(
    platform: str, profile: StageProfile, small_checkpoint: Path, tmp_path: Path
) -> None:
    spoilt = replace(profile, extra={**profile.extra, "omni_speech_accel": {"speaker_device": False}})
    with pytest.raises(RunError, match="stock has no block, and these items are on all the same: sync_free_prompt"):
        run([Arm(STOCK), ITEM], small_checkpoint, spoilt, WORK, platform, tmp_path)


def test_a_mixed_up_reference_stops_the_bench(
    stock_stage: Code2WavDriver, profile: StageProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stream is handed the first one's reference behind the bench's back."""
    original = stock_stage.step

    def step(payloads: Any) -> Any:
        swapped = [replace(one, reference=one.reference and payloads[0].reference) for one in payloads]
        outputs = original(swapped)
        stock_stage._given.update((one.stream, one.reference) for one in payloads if one.sequence == 0)
        return outputs

    monkeypatch.setattr(stock_stage, "step", step)
    monkeypatch.setattr(runner, "Code2WavDriver", lambda *args, **kwargs: stock_stage)
    with pytest.raises(ReferenceMixup, match="holds other audio"):
        run([Arm(STOCK), ITEM], Path("unused"), profile, WORK, "cpu", tmp_path)


@pytest.mark.parametrize("wrong", [{"streams": 0}, {"chunks": 2}, {"repeats": 0}])
def test_a_workload_that_measures_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Workload(**wrong)


def test_arms_are_stock_each_item_with_what_it_needs_and_all() -> None:
    arms = {arm.name: arm.block for arm in item_arms([], "cuda")}
    assert next(iter(arms)) == STOCK
    assert list(arms)[-1] == "all"
    assert arms[STOCK] is None
    on = {
        name: {key for key in KEYS if block[key]}  # beside the items, what lets them be measured on an unverified host
        for name, block in arms.items()
        if block is not None
    }
    assert on["speaker_device + speaker_graph"] == {"speaker_device", "speaker_graph"}
    assert on["sync_free_prompt"] == {"sync_free_prompt"}
    assert "stop_index_cache" not in on["all"]
    assert on["all"] == set().union(*(items for name, items in on.items() if name != "all"))


def test_on_cpu_only_items_that_run_there_are_measured() -> None:
    names = [arm.name for arm in item_arms([], "cpu")]
    assert "sync_free_prompt" in names
    assert not any("graph" in name or "stream" in name for name in names)


@pytest.mark.parametrize(
    ("item", "words"), [("s3_graph", "needs cuda or npu"), ("fish_omni_full_graph", "needs npu|no module|has no")]
)
def test_a_named_item_that_cannot_be_measured_is_an_error(item: str, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        item_arms([item], "cpu")


def test_one_item_has_no_all_arm() -> None:
    assert [arm.name for arm in item_arms(["sync_free_prompt"], "cpu")] == [STOCK, "sync_free_prompt"]
