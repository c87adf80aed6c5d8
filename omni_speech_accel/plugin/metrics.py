# SPDX-License-Identifier: Apache-2.0
"""Counters per stage and item: in the process, and as Prometheus metrics.

With ``PROMETHEUS_MULTIPROC_DIR`` set before launch, the counts of worker
processes appear in the server's ``/metrics``; prometheus_client picks its value
class when it is imported, so it is imported with the first counter only.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

__all__ = ["ItemCounters"]

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@lru_cache(maxsize=1)
def _prometheus() -> tuple[Counter, Histogram]:
    from prometheus_client import Counter, Histogram

    labels = ("stage", "item", "event")
    return (
        Counter("omni_speech_accel_events", "Events per accelerated item.", labels),
        Histogram("omni_speech_accel_seconds", "Host seconds per event.", labels, buckets=SECONDS_BUCKETS),
    )


class ItemCounters:
    """Event counts and host seconds of one item in one stage. Thread-safe."""

    def __init__(self, stage: str, item: str) -> None:
        self.stage = stage
        self.item = item
        self._lock = threading.Lock()
        self._counts: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._counter, self._histogram = _prometheus()

    def inc(self, event: str, n: int = 1) -> None:
        """Count ``n`` more of ``event`` (``calls``, ``captures``, ``replays``, ``eager``, ``failures``, ...)."""
        with self._lock:
            self._counts[event] += n
        self._counter.labels(self.stage, self.item, event).inc(n)

    def observe(self, event: str, seconds: float) -> None:
        """Add one duration of ``event``, in seconds on the host."""
        with self._lock:
            self._seconds[event] += seconds
        self._histogram.labels(self.stage, self.item, event).observe(seconds)

    def snapshot(self) -> dict[str, float]:
        """Counts by event, and ``<event>_seconds`` sums."""
        with self._lock:
            totals = {f"{event}_seconds": seconds for event, seconds in self._seconds.items()}
            return {**self._counts, **totals}
