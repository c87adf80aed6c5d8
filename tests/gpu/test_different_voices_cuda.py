# SPDX-License-Identifier: Apache-2.0
"""Different voices together on a real device: real graphs, full-size weights, the profile that the host ships."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_speech_accel.items import _reference_groups as groups
from omni_speech_accel.items import cold_reference_batch, cross_reference_decode
from omni_speech_accel.measure.driver import Code2WavDriver
from omni_speech_accel.synthetic.references import Reference, distinct_references
from tests.gpu import different_voices as voices
from tests.gpu import harness

pytestmark = pytest.mark.gpu

COLD = cold_reference_batch.KEY
CROSS = cross_reference_decode.KEY
COUNT = 4
KEEP_REFERENCES = {"token2wav_runtime_prompt_cache_size": 16}


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    return distinct_references(COUNT, voices.REFERENCE_SECONDS)


@pytest.fixture(scope="module")
def stages(platform: str, checkpoint_dir: Path) -> Iterator[dict[str, Code2WavDriver]]:
    """A stock stage and one with the three items, with the host's start-up captures behind them."""
    profile = harness.profile_with(platform, KEEP_REFERENCES)
    block = voices.only(COLD, CROSS, "cold_setup_precapture")
    built = {
        "stock": Code2WavDriver(checkpoint_dir, profile),
        "items": Code2WavDriver(checkpoint_dir, profile, block=block),
    }
    for driver in built.values():
        warm = voices.RunningStreams(driver, [None], "warm", 1)
        driver.step(warm.chunk())
        warm.finish()
    yield built
    for driver in built.values():
        driver.close()
    torch.cuda.empty_cache()


def counts(driver: Code2WavDriver, item: str) -> dict[str, float]:
    return driver.session.snapshot().get(item, {})


def host_spread(stock: Code2WavDriver, reference: Reference, sizes: tuple[int, ...]) -> float:
    """How far the host's own initial state of one reference moves with the batch size that it is solved in."""
    item = voices.starting_items(stock, [reference], "spread-")[0]
    features = stock.backend.prepare_prompt(item.prompt_cache_id, item.prompt_wav)
    with voices.serving(stock):
        (alone,) = stock.backend._create_initial_states(features, 1)
        return max(
            voices.state_error(state, alone)
            for size in sizes
            for state in stock.backend._create_initial_states(features, size)
        )


def test_cold_references_are_grouped_and_their_states_within_the_hosts_spread(
    stages: dict[str, Code2WavDriver], references: list[Reference]
) -> None:
    stock, ours = stages["stock"], stages["items"]
    expected = voices.cold_setups(stock, voices.starting_items(stock, references, "cold-"))
    before = counts(ours, COLD).get("references", 0)
    items = voices.starting_items(ours, references, "cold-")
    for _ in range(3):  # the last from the encoder's graph
        found = voices.cold_setups(ours, items)
    assert counts(ours, COLD)["references"] - before == 3 * COUNT
    assert counts(ours, COLD)["replays"] >= 1
    assert counts(ours, COLD).get("failures", 0) == counts(ours, COLD).get("refused", 0) == 0
    # The same rounding, drawn for other references: twice the largest that the host shows on one, and the floor of
    # fp32 where the host happens not to move at all.
    bound = max(2 * host_spread(stock, references[0], (2, 4)), 1e-6)
    errors = [voices.state_error(mine, theirs) for mine, theirs in zip(found, expected, strict=True)]
    print(f"relative errors {errors}, bound {bound:.2e}")
    assert max(errors) <= bound
    # And far from another reference's state.
    assert voices.state_error(found[0], expected[1]) > 100 * bound


def test_every_reference_owns_its_storage(stages: dict[str, Code2WavDriver], references: list[Reference]) -> None:
    ours = stages["items"]
    states = voices.cold_setups(ours, voices.starting_items(ours, references, "own-"))
    storages = [{value.untyped_storage().data_ptr() for value in voices.state_tensors(state).values() if value.numel()}
                for state in states]  # fmt: skip
    assert len(set().union(*storages)) == sum(map(len, storages))
    for state in states:
        for value in voices.state_tensors(state).values():
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_the_encoders_graph_gives_the_bits_of_a_lone_reference(
    stages: dict[str, Code2WavDriver], references: list[Reference]
) -> None:
    stock, ours = stages["stock"], stages["items"]
    expected = voices.cold_setups(stock, voices.starting_items(stock, references, "bits-"))
    items = voices.starting_items(ours, references, "bits-")
    for _ in range(3):
        found = voices.cold_setups(ours, items)
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("conformer_cnn_cache", "conformer_att_cache"):
            assert torch.equal(mine.flow_cache[name], theirs.flow_cache[name])


def test_the_peak_of_a_group_keeps_to_the_formula(
    stages: dict[str, Code2WavDriver], references: list[Reference]
) -> None:
    ours = stages["items"]
    items = voices.starting_items(ours, references, "peak-")
    frames = int(ours.backend.prepare_prompt(items[0].prompt_cache_id, items[0].prompt_wav).mels.shape[1])
    for _ in range(3):
        voices.cold_setups(ours, items)
    ours.backend._setup_cache.clear()
    torch.accelerator.synchronize(ours.device)
    before = torch.cuda.memory_allocated(ours.device)
    torch.cuda.reset_peak_memory_stats(ours.device)
    states = voices.cold_setups(ours, items)
    peak = torch.cuda.max_memory_allocated(ours.device) - before
    formula = COUNT * cold_reference_batch.transient_bytes_per_reference(ours.backend, frames)
    print(f"peak {peak / 2**20:.0f} MiB, formula {formula / 2**20:.0f} MiB")
    assert peak <= formula
    assert len(states) == COUNT


def test_running_streams_of_different_voices_decode_as_one_batch_within_the_hosts_spread(
    stages: dict[str, Code2WavDriver], references: list[Reference]
) -> None:
    stock, ours = stages["stock"], stages["items"]
    before = counts(ours, CROSS).get("rows", 0)
    audio: dict[str, list[list[torch.Tensor]]] = {}
    states: dict[str, list[Any]] = {}
    for name, driver in stages.items():
        streams = voices.RunningStreams(driver, references, "run-", 5)
        audio[name] = [harness.forward(driver, streams.chunk(), seed=0) for _ in range(5)]
        states[name] = [driver.model._states[stream].token2wav for stream in streams.names]
        streams.finish()
    assert counts(ours, CROSS)["rows"] - before == 5 * COUNT
    # The host's own spread: the same stream alone, and among others of its reference.
    crowd = voices.RunningStreams(stock, [references[0]] * COUNT, "run-", 5)
    for _ in range(5):
        harness.forward(stock, crowd.chunk(), seed=0)
    bound = max(2 * voices.state_error(stock.model._states["run-0"].token2wav, states["stock"][0]), 1e-6)
    crowd.finish()
    for mine, theirs in zip(states["items"], states["stock"], strict=True):
        errors = voices.state_errors(mine, theirs)
        print(errors, f"bound {bound:.2e}")
        assert max(errors.values()) <= bound
    # The vocoder draws its noise per call: the length is what must agree sample by sample.
    for step, parts in enumerate(audio["items"]):
        assert [part.shape for part in parts] == [part.shape for part in audio["stock"][step]]
        assert all(bool(torch.isfinite(part).all()) for part in parts)


def test_one_voice_decodes_bit_for_bit_as_stock(stages: dict[str, Code2WavDriver], references: list[Reference]) -> None:
    audio = {}
    for name, driver in stages.items():
        streams = voices.RunningStreams(driver, [references[0]] * COUNT, "one-", 3)
        audio[name] = [harness.forward(driver, streams.chunk(), seed=step) for step in range(3)]
        streams.finish()
    for mine, theirs in zip(audio["items"], audio["stock"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class TestWholeSolveGraphs:
    @pytest.fixture(autouse=True)
    def graphs(self, stages: dict[str, Code2WavDriver]) -> Any:
        graphs = getattr(stages["items"].backend, "_whole_euler_graph_wrapper", None)
        if graphs is None:
            pytest.skip("the host has no whole-solve graphs")
        return graphs

    def test_setup_graphs_stand_after_start_up_within_the_budget(self, graphs: Any) -> None:
        setup = [key[1] for key in graphs._cache if key[3] == 0]
        assert setup[: len(graphs._graph_batches())] == graphs._graph_batches()  # in the order of their capture
        assert graphs.stats_snapshot()["cache_size"] <= graphs.max_graphs
        # Captured in this order: whatever decode graph start-up has comes first.
        keys = list(graphs._cache)
        assert keys[0][3] > 0

    def test_cold_references_capture_nothing_while_serving(
        self, graphs: Any, stages: dict[str, Code2WavDriver], references: list[Reference]
    ) -> None:
        ours = stages["items"]
        before = graphs.stats_snapshot()["captures"]
        voices.cold_setups(ours, voices.starting_items(ours, references, "none-"))
        assert graphs.stats_snapshot()["captures"] == before

    def test_a_refused_group_is_served_by_the_graph_of_one_reference(
        self, graphs: Any, stages: dict[str, Code2WavDriver], references: list[Reference]
    ) -> None:
        ours, stock = stages["items"], stages["stock"]
        expected = voices.cold_setups(stock, voices.starting_items(stock, references, "refused-"))
        taken = {key: graphs._cache.pop(key) for key in list(graphs._cache) if key[3] == 0 and key[1] > 1}
        budget, graphs.max_graphs = graphs.max_graphs, len(graphs._cache)
        before, hits = counts(ours, COLD).get("refused", 0), graphs.stats_snapshot()["hits"]
        try:
            found = voices.cold_setups(ours, voices.starting_items(ours, references, "refused-"))
        finally:
            graphs.max_graphs = budget
            graphs._cache.update(taken)
            graphs._unsupported.clear()
        assert counts(ours, COLD)["refused"] - before == COUNT
        assert graphs.stats_snapshot()["hits"] - hits == COUNT
        errors = [voices.state_error(mine, theirs) for mine, theirs in zip(found, expected, strict=True)]
        assert max(errors) <= 1e-6  # the same kernels on the same shapes, captured by another stage


def test_the_configured_cap_bounds_the_peak(platform: str, checkpoint_dir: Path, references: list[Reference]) -> None:
    # Room for two references of six seconds and not for three, on either host.
    extra = {**KEEP_REFERENCES, "cfm_graph_precapture": False}
    profile = harness.profile_with(platform, extra)
    probe_cap = 2500
    driver = Code2WavDriver(checkpoint_dir, profile, block=voices.only(COLD, **{COLD: {"max_memory_mib": probe_cap}}))
    try:
        items = voices.starting_items(driver, references, "cap-")
        features = driver.backend.prepare_prompt(items[0].prompt_cache_id, items[0].prompt_wav)
        size = cold_reference_batch.solve_together(driver.session.item(COLD), driver.backend, features)
        assert size == 2
        for _ in range(3):
            voices.cold_setups(driver, items)
        driver.backend._setup_cache.clear()
        torch.accelerator.synchronize(driver.device)
        before = torch.cuda.memory_allocated(driver.device)
        torch.cuda.reset_peak_memory_stats(driver.device)
        states = voices.cold_setups(driver, items[:2])
        peak = torch.cuda.max_memory_allocated(driver.device) - before
        print(f"peak {peak / 2**20:.0f} MiB under a cap of {probe_cap} MiB")
        assert peak <= probe_cap << 20
        assert len(states) == 2
        assert groups.memory_budget(driver.device, None) is not None
    finally:
        driver.close()
        torch.cuda.empty_cache()
