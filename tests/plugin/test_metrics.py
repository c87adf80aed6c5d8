# SPDX-License-Identifier: Apache-2.0
"""Counters: made once, exact, cheap, and never the end of a request."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from omni_speech_accel.plugin.metrics import ItemCounters


def in_a_process(code: str, **variables: str) -> str:
    """What ``code`` prints in a process that has not imported prometheus_client."""
    run = subprocess.run(
        [sys.executable, "-c", "import os\n" + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **variables},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


FIRST_COUNTS = """
    import sys, threading
    from omni_speech_accel.plugin.metrics import ItemCounters
    assert "prometheus_client" not in sys.modules
    barrier, errors = threading.Barrier(6), []

    def count():
        barrier.wait()
        try:
            ItemCounters("stage", "item").inc("calls")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=count) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors, errors
"""


def test_threads_that_count_first_and_together_make_the_metrics_once() -> None:
    in_a_process(
        FIRST_COUNTS
        + """
    from prometheus_client import REGISTRY
    labels = {"stage": "stage", "item": "item", "event": "calls"}
    assert REGISTRY.get_sample_value("omni_speech_accel_events_total", labels) == 6
    """
    )


SCRAPE = """
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    def scraped(event):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        labels = {"stage": "stage", "item": "item", "event": event}
        return registry.get_sample_value("omni_speech_accel_events_total", labels)
"""


def test_counts_of_a_worker_are_in_the_servers_folder_at_once(tmp_path: Path) -> None:
    in_a_process(FIRST_COUNTS + SCRAPE + "\n    assert scraped('calls') == 6", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))


@pytest.mark.parametrize("then", ["shutil.rmtree(folder)", "shutil.rmtree(folder); open(folder, 'w').close()"])
@pytest.mark.parametrize("counted_before", [True, False])
def test_a_metrics_folder_that_is_gone_fails_nothing_and_is_told_once(
    tmp_path: Path, then: str, counted_before: bool
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    told = in_a_process(
        f"""
        import shutil
        from omni_speech_accel.plugin.metrics import ItemCounters, open_export
        open_export()
        counters = ItemCounters("stage", "item")
        if {counted_before}:
            counters.inc("calls")
        folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
        {then}
        for event in ("calls", "replays", "eager"):
            counters.inc(event, 2)
            counters.observe(event, 0.1)
        snapshot = counters.snapshot()
        assert snapshot["eager"] == 2 and snapshot["calls"] == 2 + {counted_before}, snapshot
        assert round(snapshot["eager_seconds"], 3) == 0.1
        """,
        PROMETHEUS_MULTIPROC_DIR=str(folder),
    )
    assert told.count("counting in memory only") == 1


def test_two_models_of_one_stage_name_are_one_row_of_sums() -> None:
    from prometheus_client import REGISTRY

    for seconds in (0.004, 0.3):
        counters = ItemCounters("twice", "item")
        counters.inc("calls")
        counters.observe("calls", seconds)
    labels = {"stage": "twice", "item": "item", "event": "calls"}
    assert REGISTRY.get_sample_value("omni_speech_accel_events_total", labels) == 2
    assert REGISTRY.get_sample_value("omni_speech_accel_seconds_count", labels) == 2
    assert REGISTRY.get_sample_value("omni_speech_accel_seconds_sum", labels) == pytest.approx(0.304)
    for bound, below in (("0.0025", 0), ("0.005", 1), ("0.5", 2), ("+Inf", 2)):
        assert REGISTRY.get_sample_value("omni_speech_accel_seconds_bucket", {**labels, "le": bound}) == below


def test_a_count_that_nobody_reads_touches_no_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    import prometheus_client

    counters = ItemCounters("cheap", "item")
    for metric in (prometheus_client.Counter, prometheus_client.Histogram):
        monkeypatch.setattr(metric, "labels", lambda *_: pytest.fail("a label look-up in a request"))
    assert counters._files is None
    rounds = 10_000
    started = time.perf_counter()
    for _ in range(rounds):
        counters.inc("calls")
    # A quarter of a microsecond on an idle core; the bound is for a busy machine.
    assert (time.perf_counter() - started) / rounds < 20e-6
