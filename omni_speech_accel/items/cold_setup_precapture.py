# SPDX-License-Identifier: Apache-2.0
"""Graphs of the initial CFM solve, captured at start-up.

Why: the host captures the graphs of every cache length that a stream passes
through, but not the one at length zero, in which a reference itself is solved.
The first cold reference of each batch size then pays for a capture while streams
wait.

What: after the host's own precapture, and so after the decode and tail shapes,
the default reference is solved once per graphed batch size, smallest first,
until the host's unchanged graph budget is used up. It is the very path that
later serves cold references, so a graph is captured with the precision, padding
and memory layout that it is replayed with, and the prompt encoder's graphs come
along. The larger sizes are only solved where ``cold_reference_batch`` is on.

References of other lengths still have their graph captured when first seen.
0.30.0 captures per Euler step and has no precapture: the item does not apply.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from omni_speech_accel.items import _reference_groups as groups
from omni_speech_accel.items import cold_reference_batch
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.session import Item

KEY = "cold_setup_precapture"

logger = logging.getLogger("vllm.omni_speech_accel")


def precapture_whole_euler(item: Item[ItemOptions], wrapped: Any, backend: Any, /, features: Any) -> int:
    """The host's precapture, then the setup graphs; returns how many graphs both captured."""
    captured: int = wrapped(features)
    try:
        return captured + _capture(item, backend, features)
    except Exception:
        if getattr(backend._whole_euler_graph_wrapper, "_failed", False):
            raise  # The host ends the start-up on such a failure, since no graph can be captured after it.
        logger.warning("omni_speech_accel: setup precapture failed; its graphs are captured lazily", exc_info=True)
        item.counters.inc("failures")
        return captured


def _capture(item: Item[ItemOptions], backend: Any, features: Any) -> int:
    graphs = backend._whole_euler_graph_wrapper
    if not cold_reference_batch.supported(backend) or graphs.att_slots:
        return 0
    session = item.session
    cold = session.item(cold_reference_batch.KEY) if session.on(cold_reference_batch.KEY) else None
    limit = cold_reference_batch.solve_together(cold, backend, features) if cold is not None else 1
    before = graphs.stats_snapshot()["captures"]
    for size in graphs._graph_batches():
        if size > limit or graphs.stats_snapshot()["cache_size"] >= graphs.max_graphs:
            break
        try:
            with torch.inference_mode():
                if cold is not None:
                    cold_reference_batch.warm(cold, backend, features, size)
                else:
                    backend.setup_batch(features, 1)
        except cold_reference_batch.Refused:
            break
        if not groups.whole_solve_graphs(backend):
            break  # A failed capture has disabled the host's graphs, as it would while serving.
    captured: int = graphs.stats_snapshot()["captures"] - before
    item.counters.inc("captures", captured)
    return captured
