# SPDX-License-Identifier: Apache-2.0
"""Counters per stage and item: in the process, and as Prometheus metrics.

Counting is adding in memory, since it stands on hot paths; Prometheus reads the sums when it is scraped. With
``PROMETHEUS_MULTIPROC_DIR`` set before launch, a worker's counts appear in the server's ``/metrics`` by way of
prometheus_client's files there, so they are written as they come. Whatever only watches fails no request: a folder
that has gone is told once, and counting goes on in memory.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from omni_speech_accel.environment import METRICS_DIRECTORY

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

logger = logging.getLogger("vllm.omni_speech_accel")

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
EVENTS = ("omni_speech_accel_events", "Events per accelerated item.")
SECONDS = ("omni_speech_accel_seconds", "Host seconds per event.")
LABELS = ("stage", "item", "event")

_lock = threading.Lock()
_counted: list[ItemCounters] = []


class _Files:
    """Counts of this process in prometheus_client's folder, until it refuses one."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self._counter: Counter | None = Counter(*EVENTS, LABELS)
        self._histogram: Histogram = Histogram(*SECONDS, LABELS, buckets=SECONDS_BUCKETS)
        self._children = cache(self._child)

    def _child(self, metric: Any, labels: tuple[str, str, str]) -> Any:
        return metric.labels(*labels)

    def inc(self, labels: tuple[str, str, str], n: int) -> None:
        if self._counter is not None:
            try:
                self._children(self._counter, labels).inc(n)
            except Exception as error:
                self._stop(error)

    def observe(self, labels: tuple[str, str, str], seconds: float) -> None:
        if self._counter is not None:
            try:
                self._children(self._histogram, labels).observe(seconds)
            except Exception as error:
                self._stop(error)

    def _stop(self, error: Exception) -> None:
        with _lock:
            known, self._counter = self._counter is None, None
        if not known:
            _tell(error)


class _AtScrape:
    """Reads the counts of this process when its registry is asked."""

    def describe(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        yield CounterMetricFamily(*EVENTS, labels=LABELS)
        yield HistogramMetricFamily(*SECONDS, labels=LABELS)

    def collect(self) -> Iterator[Any]:
        events, seconds = self.describe()
        counts: dict[tuple[str, ...], int] = defaultdict(int)
        timed: dict[tuple[str, ...], tuple[float, list[int]]] = {}
        with _lock:
            everyone = list(_counted)
        for counters in everyone:  # two models of one stage name are one row
            counters._add_to(counts, timed)
        for labels, count in counts.items():
            events.add_metric(labels, count)
        for labels, (total, buckets) in timed.items():
            upto = [sum(buckets[: index + 1]) for index in range(len(buckets))]
            bounds = [*(str(bound) for bound in SECONDS_BUCKETS), "+Inf"]
            seconds.add_metric(labels, list(zip(bounds, upto, strict=True)), total)
        yield events
        yield seconds


def _tell(error: Exception) -> None:
    logger.warning("omni_speech_accel: counting in memory only: %s: %s", type(error).__name__, error)


_exporter: list[_Files | None] = []


def open_export() -> _Files | None:
    """Make the process's Prometheus metrics, once and before requests.

    Returns the files to write to, where the counts of this process cannot be read at a scrape. prometheus_client picks
    its value class when it is imported, so it is imported here and not before.
    """
    with _lock:
        if not _exporter:
            _exporter.append(None)
            try:
                if os.environ.get(METRICS_DIRECTORY):
                    _exporter[0] = _Files()
                else:
                    from prometheus_client import REGISTRY

                    REGISTRY.register(_AtScrape())
            except Exception as error:
                _tell(error)
        return _exporter[0]


class ItemCounters:
    """Event counts and host seconds of one item in one stage. Thread-safe."""

    def __init__(self, stage: str, item: str) -> None:
        self.stage = stage
        self.item = item
        self._lock = threading.Lock()
        self._counts: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._buckets: dict[str, list[int]] = {}
        self._files = open_export()
        with _lock:
            _counted.append(self)

    def inc(self, event: str, n: int = 1) -> None:
        """Count ``n`` more of ``event`` (``calls``, ``captures``, ``replays``, ``eager``, ``failures``, ...)."""
        with self._lock:
            self._counts[event] += n
        if self._files is not None:
            self._files.inc((self.stage, self.item, event), n)

    def observe(self, event: str, seconds: float) -> None:
        """Add one duration of ``event``, in seconds on the host."""
        with self._lock:
            self._seconds[event] += seconds
            buckets = self._buckets.get(event)
            if buckets is None:
                buckets = self._buckets[event] = [0] * (len(SECONDS_BUCKETS) + 1)
            buckets[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        if self._files is not None:
            self._files.observe((self.stage, self.item, event), seconds)

    def snapshot(self) -> dict[str, float]:
        """Counts by event, and ``<event>_seconds`` sums."""
        with self._lock:
            totals = {f"{event}_seconds": seconds for event, seconds in self._seconds.items()}
            return {**self._counts, **totals}

    def _add_to(
        self, counts: dict[tuple[str, ...], int], timed: dict[tuple[str, ...], tuple[float, list[int]]]
    ) -> None:
        with self._lock:
            for event, count in self._counts.items():
                counts[self.stage, self.item, event] += count
            for event, buckets in self._buckets.items():
                labels = (self.stage, self.item, event)
                total, sums = timed.get(labels, (0.0, [0] * len(buckets)))
                timed[labels] = (
                    total + self._seconds[event],
                    [one + other for one, other in zip(sums, buckets, strict=True)],
                )
