# SPDX-License-Identifier: Apache-2.0
"""What a graph cache reports to: any object with `inc` and `observe`."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol


class Counters(Protocol):
    """Receiver of a cache's events.

    Every call of a cache is exactly one of `captures`, `replays` or `eager`; `failures` counts shapes given up on,
    beside the `eager` of the same call. Seconds are host time: what the calling thread spent.
    """

    def inc(self, event: str, n: int = 1) -> None: ...

    def observe(self, event: str, seconds: float) -> None: ...


class PlainCounters:
    """Counters in plain memory, for use without a metrics library. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def inc(self, event: str, n: int = 1) -> None:
        with self._lock:
            self._counts[event] += n

    def observe(self, event: str, seconds: float) -> None:
        with self._lock:
            self._seconds[event] += seconds

    def snapshot(self) -> dict[str, float]:
        """Counts by event, and `<event>_seconds` for each event that was timed."""
        with self._lock:
            return {**self._counts, **{f"{event}_seconds": spent for event, spent in self._seconds.items()}}
