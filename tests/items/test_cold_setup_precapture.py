# SPDX-License-Identifier: Apache-2.0
"""The graphs of the initial solve are captured at start-up, after the host's own and within its budget."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from omni_speech_accel.anchors import stages as stage
from omni_speech_accel.items import cold_setup_precapture as item
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.table import patch_for
from tests.items import tiny_code2wav as tiny
from tests.items.tiny_code2wav import npu_patched, quiet_vocoder  # noqa: F401

BLOCK = {"cold_setup_precapture": True, "cold_reference_batch": True, "cross_reference_decode": False}

needs_whole_solve_graphs = pytest.mark.skipif(
    not tiny.has_whole_solve_graphs(), reason="the host has no precapture of solve graphs"
)


@pytest.fixture
def on_cuda(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The item acts where a device records graphs; the test's graphs are simulated."""
    monkeypatch.setattr(stage, "device_type", lambda: "cuda")


def make_stage(block: Any, **graphs: Any) -> Any:
    made = tiny.make_stage(block)
    options = {"micro_batch_size": 4, "offset_bucket_frames": 50, **graphs}
    made.graphs = tiny.simulate_whole_solve_graphs(made, **options)
    return made


def precapture(made: Any) -> int:
    """The host's start-up call for the default reference: 20 codec tokens, so 40 frames, 48 on the capture grid."""
    features = made.backend.prepare_prompt("default", "voice-0-20.wav")
    captured: int = made.backend.precapture_whole_euler(features)
    return captured


def test_the_host_that_captures_no_solve_graphs_says_so() -> None:
    judged = fit(patch_for("cold_setup_precapture"))
    assert judged.applies == tiny.has_whole_solve_graphs()
    if not judged.applies:
        assert "precapture_whole_euler" in judged.reason


def test_it_does_not_act_without_a_device_that_records_graphs() -> None:
    assert "cpu" not in patch_for("cold_setup_precapture").platforms


@needs_whole_solve_graphs
class TestPrecapture:
    def stock_captures(self) -> list[tuple[int, int, int]]:
        made = make_stage(None, max_graphs=64)
        precapture(made)
        return list(made.graphs.captured)

    def test_setup_graphs_follow_the_hosts_smallest_batch_first(self, on_cuda: None) -> None:
        made = make_stage(BLOCK, max_graphs=64)
        captured = precapture(made)
        stock = self.stock_captures()
        assert stock
        assert all(offset > 0 for _, _, offset in stock)
        assert made.graphs.captured == [*stock, (1, 48, 0), (2, 48, 0), (4, 48, 0)]
        assert captured == len(stock) + 3
        assert tiny.session(made).snapshot()[item.KEY]["captures"] == 3

    @pytest.mark.parametrize("room", [0, 1, 2])
    def test_a_tight_budget_is_spent_on_decode_graphs_first_and_never_exceeded(self, on_cuda: None, room: int) -> None:
        stock = self.stock_captures()
        made = make_stage(BLOCK, max_graphs=len(stock) + room)
        precapture(made)
        assert made.graphs.captured == [*stock, (1, 48, 0), (2, 48, 0), (4, 48, 0)][: len(stock) + room]
        # A budget that is full is not asked: the host would remember the shape as refused.
        assert not made.graphs._unsupported

    def test_a_budget_too_small_for_the_hosts_own_graphs_is_left_to_it(self, on_cuda: None) -> None:
        stock = self.stock_captures()
        made = make_stage(BLOCK, max_graphs=len(stock) - 1)
        precapture(made)
        assert made.graphs.captured == stock[:-1]

    def test_cold_references_of_the_default_length_capture_nothing_while_serving(self, on_cuda: None) -> None:
        made = make_stage(BLOCK, max_graphs=64)
        precapture(made)
        before = [key for key in made.graphs.captured if key[2] == 0]
        tiny.step(made, tiny.streams("voice-1-20", "voice-2-20", "voice-3-20", "voice-4-20"))
        assert [key for key in made.graphs.captured if key[2] == 0] == before
        assert made.graphs.replayed[3] == 4

    def test_without_grouped_setup_only_the_graph_of_one_reference_is_needed(self, on_cuda: None) -> None:
        made = make_stage({**BLOCK, "cold_reference_batch": False}, max_graphs=64)
        precapture(made)
        assert [key for key in made.graphs.captured if key[2] == 0] == [(1, 48, 0)]

    def test_sizes_beyond_the_groups_bound_are_not_captured(self, on_cuda: None) -> None:
        made = make_stage({**BLOCK, "cold_reference_batch": {"max_batch": 2}}, max_graphs=64)
        precapture(made)
        assert [key for key in made.graphs.captured if key[2] == 0] == [(1, 48, 0), (2, 48, 0)]

    def test_switched_off_it_leaves_the_hosts_precapture(self, on_cuda: None) -> None:
        made = make_stage({**BLOCK, "cold_setup_precapture": False}, max_graphs=64)
        precapture(made)
        assert made.graphs.captured == self.stock_captures()

    def test_resident_caches_keep_the_hosts_precapture(self, on_cuda: None) -> None:
        made = make_stage(BLOCK, max_graphs=64)
        made.graphs.att_slots = 4
        made.graphs.precapture = lambda **_: 7
        assert precapture(made) == 7
        assert made.graphs.captured == []

    def test_the_solve_runs_in_the_stages_precision_and_publishes_nothing(self, on_cuda: None) -> None:
        made = make_stage(BLOCK, max_graphs=64)
        made.backend._cfm_tf32 = True
        seen: list[bool] = []
        step = made.backend._estimator_step

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return step(*args, **kwargs)

        made.backend.__dict__["_estimator_step"] = watched
        precapture(made)
        # The simulated replay runs the host's plain solve inside the host's decorated one.
        assert seen
        assert all(seen)
        assert not made.backend._setup_cache
        assert list(made.backend._prompt_features) == [("default", "voice-0-20.wav")]

    def test_the_npu_patchs_attention_context_is_open(self, on_cuda: None, npu_patched: list[str]) -> None:  # noqa: F811
        for block in (BLOCK, {**BLOCK, "cold_reference_batch": False}):
            made = make_stage(block, max_graphs=64)
            with tiny.calls_of(made.backend, "_encode_chunk_eager", lambda *_, **__: list(npu_patched)) as contexts:
                precapture(made)
            assert contexts
            assert all(context == ["cpu"] for context in contexts)

    def test_a_failure_is_logged_and_start_up_goes_on(self, on_cuda: None, caplog: pytest.LogCaptureFixture) -> None:
        made = make_stage(BLOCK, max_graphs=64)
        stock = self.stock_captures()

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no memory for this")

        made.backend.__dict__["_encode_chunk_eager"] = broken
        logger = logging.getLogger("vllm.omni_speech_accel")
        logger.addHandler(caplog.handler)
        try:
            assert precapture(made) == len(stock)
        finally:
            logger.removeHandler(caplog.handler)
        assert "captured lazily" in caplog.text
        assert made.graphs.captured == stock

    def test_a_capture_that_disables_the_hosts_graphs_ends_it(self, on_cuda: None) -> None:
        made = make_stage(BLOCK, max_graphs=64)
        capture = made.graphs._capture

        def failing(key: Any, **rest: Any) -> Any:
            if key[3] == 0:
                made.graphs.enabled = False
                return None
            return capture(key, **rest)

        made.graphs._capture = failing
        stock = self.stock_captures()
        assert precapture(made) == len(stock)
        assert not made.graphs.enabled

    def test_a_failure_that_ends_the_hosts_start_up_ends_it_here_too(self, on_cuda: None) -> None:
        made = make_stage(BLOCK, max_graphs=64)

        def fatal(key: Any, **_: Any) -> Any:
            if key[3] == 0:
                made.graphs._failed = True
                raise RuntimeError("restart required")
            made.graphs._stats["captures"] += 1
            return (key,)

        made.graphs._capture = fatal
        with pytest.raises(RuntimeError, match="restart required"):
            precapture(made)
