# SPDX-License-Identifier: Apache-2.0
"""Cold references of one step are solved together, and every state and cache is what the host makes of each alone."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel.items import _reference_groups as groups
from omni_speech_accel.items import cold_reference_batch as item
from tests.items import tiny_code2wav as tiny
from tests.items.tiny_code2wav import npu_patched, quiet_vocoder  # noqa: F401

ONLY = {"cold_reference_batch": True, "cross_reference_decode": False, "cold_setup_precapture": False}
BOTH = {**ONLY, "cross_reference_decode": True}
THREE = ("voice-1-20", "voice-2-20", "voice-3-20")
WHOLE = tiny.has_whole_solve_graphs()

pytestmark = pytest.mark.usefixtures("registered", "quiet_vocoder")


def make_stage(block: Any = ONLY, *, setup_cache: int = 1, graphs: dict[str, Any] | None = None, **extra: Any) -> Any:
    """A stage with the policy that the item serves: on 0.32.0rc1 the fused whole-solve graphs, simulated on a CPU."""
    stage = tiny.make_stage(block, setup_cache=setup_cache, **extra)
    if WHOLE:
        stage.graphs = tiny.simulate_whole_solve_graphs(stage, **(graphs or {}))
    return stage


def solves(stage: Any) -> Any:
    """Rows of each initial solve that reaches the host."""
    record = tiny.calls_of(stage.backend, "_estimator_step", lambda *_, x, cnn_cache, **__: (len(x) // 2, cnn_cache))
    return _InitialSolves(record)


class _InitialSolves:
    def __init__(self, record: Any) -> None:
        self._record = record

    def __enter__(self) -> _InitialSolves:
        self._steps = self._record.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._record.__exit__(*error)

    @property
    def sizes(self) -> list[int]:
        return [rows for rows, cache in self._steps if cache is None][:: tiny.STEPS]


def encodes(stage: Any) -> Any:
    """Rows of each call of the flow encoder without caches, that is over a reference."""
    record = tiny.calls_of(
        stage.backend.flow.encoder, "forward_chunk", lambda *_, xs, att_cache, **__: (len(xs), att_cache)
    )
    return record


def prompt_rows(calls: list[Any]) -> list[int]:
    return [rows for rows, cache in calls if cache is None]


def states_of(stage: Any, voices: tuple[str, ...]) -> dict[str, Any]:
    """The initial states that the stage's setup cache holds, by reference."""
    found = {}
    for key, value in stage.backend._setup_cache.items():
        assert key[0][0] in voices
        found[key[0][0]] = value[0] if isinstance(value, tuple) else value
    return found


@lru_cache(maxsize=1)
def host_spread() -> float:
    """Largest move of a value of an initial state when the host solves its reference in a batch of three."""
    backend = tiny.make_stage().backend
    features = backend.prepare_prompt("voice-1-20", "voice-1-20.wav")
    with torch.inference_mode():
        (alone,), many = backend._create_initial_states(features, 1), backend._create_initial_states(features, 3)
    return max(
        float((state.flow_cache[name] - value).abs().max())
        for state in many
        for name, value in alone.flow_cache.items()
    )


def assert_equal_states(found: Any, expected: Any) -> None:
    for caches in ("flow_cache", "hift_cache"):
        for name, value in getattr(expected, caches).items():
            # The floor is two units in the last place of values around 4, as an attention cache holds them.
            torch.testing.assert_close(getattr(found, caches)[name], value, rtol=0, atol=max(8 * host_spread(), 1e-6))


def test_cold_references_are_solved_as_one_batch_and_equal_each_alone() -> None:
    stock, ours = make_stage(None, setup_cache=8), make_stage(setup_cache=8)
    with solves(stock) as apart:
        tiny.step(stock, tiny.streams(*THREE))
    with solves(ours) as together, encodes(ours) as encoded:
        tiny.step(ours, tiny.streams(*THREE))
    assert apart.sizes == [1, 1, 1]
    assert together.sizes == [3]
    assert prompt_rows(encoded) == [1, 1, 1]
    expected, found = states_of(stock, THREE), states_of(ours, THREE)
    assert list(found) == list(expected) == list(THREE)
    for voice in THREE:
        assert_equal_states(found[voice], expected[voice])


def test_the_comparison_would_notice_another_voice() -> None:
    stage = make_stage(None, setup_cache=8)
    tiny.step(stage, tiny.streams(*THREE))
    first, second = (states_of(stage, THREE)[voice].flow_cache["estimator_att_cache"] for voice in THREE[:2])
    assert float((first - second).abs().max()) > 1e4 * max(8 * host_spread(), 1e-6)


def test_streams_sound_as_in_stock() -> None:
    stock, ours, both = make_stage(None), make_stage(), make_stage(BOTH)
    runs = []
    for stage in (stock, ours, both):
        streams = tiny.streams(*THREE, "voice-1-20")
        for _ in range(4):
            tiny.step(stage, streams)
        runs.append(streams)
    for streams in runs[1:]:
        for one, other in zip(streams, runs[0], strict=True):
            for audio, expected in zip(one.audio, other.audio, strict=True):
                torch.testing.assert_close(audio, expected, rtol=0, atol=2e-6)


def test_speaker_projections_are_the_ones_of_each_reference_alone() -> None:
    stage = make_stage()
    with tiny.calls_of(
        stage.backend, "_estimator_step", lambda *_, speakers, cnn_cache, **__: (speakers.clone(), cnn_cache)
    ) as calls:
        tiny.step(stage, tiny.streams(*THREE))
    backend = stage.backend
    expected = [
        backend.flow.spk_embed_affine_layer(
            torch.nn.functional.normalize(backend.prepare_prompt(voice, f"{voice}.wav").speaker_embedding, dim=1)
        )
        for voice in THREE
    ]
    grouped = next(speakers for speakers, cache in calls if cache is None)
    assert torch.equal(grouped[:3], torch.cat(expected))


def test_mixed_shapes_are_grouped_by_shape() -> None:
    voices = ("voice-1-20", "voice-2-24", "voice-3-20", "voice-4-24", "voice-5-30")
    stock, ours = make_stage(None, setup_cache=8), make_stage(setup_cache=8)
    tiny.step(stock, tiny.streams(*voices))
    with solves(ours) as together:
        tiny.step(ours, tiny.streams(*voices))
    assert together.sizes == [2, 2, 1]
    expected, found = states_of(stock, voices), states_of(ours, voices)
    assert list(found) == list(expected)
    for voice in voices:
        assert_equal_states(found[voice], expected[voice])


def test_the_configured_maximum_bounds_a_group() -> None:
    stage = make_stage({**ONLY, "cold_reference_batch": {"max_batch": 2}})
    with solves(stage) as together:
        tiny.step(stage, tiny.streams(*THREE, "voice-4-20", "voice-5-20"))
    assert together.sizes == [2, 2, 1]


@pytest.mark.skipif(not WHOLE, reason="the host has no microbatch and no graphed batch limit")
@pytest.mark.parametrize("limit", [{"micro_batch_size": 2}, {"micro_batch_size": 4, "max_graph_batch": 2}])
def test_the_microbatch_and_the_graph_batch_bound_a_group(limit: dict[str, int]) -> None:
    stage = make_stage(graphs=limit)
    with solves(stage) as together:
        tiny.step(stage, tiny.streams(*THREE, "voice-4-20"))
    assert together.sizes == [2, 2]


@pytest.mark.skipif(WHOLE, reason="the host plans its graphs' batch sizes itself")
def test_sizes_are_powers_of_two_where_each_size_costs_graphs() -> None:
    stage = make_stage()
    tiny.simulate_step_graphs(stage)
    with solves(stage) as together:
        tiny.step(stage, tiny.streams(*(f"voice-{seed}-20" for seed in range(7))))
    assert together.sizes == [4, 2, 1]


def test_memory_bounds_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item, "transient_bytes_per_reference", lambda *_: 30 << 20)
    stage = make_stage({**ONLY, "cold_reference_batch": {"max_memory_mib": 64}})
    with solves(stage) as together:
        tiny.step(stage, tiny.streams(*THREE, "voice-4-20"))
    assert together.sizes == [2, 2]


def test_too_little_free_memory_leaves_every_reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item, "transient_bytes_per_reference", lambda *_: 30 << 20)
    monkeypatch.setattr(groups, "accelerator_for", lambda device: SimpleNamespace(memory_free=lambda device: 60 << 20))
    stage = make_stage()
    with solves(stage) as apart:
        tiny.step(stage, tiny.streams(*THREE))
    assert apart.sizes == [1, 1, 1]


def test_the_memory_formula_counts_what_a_group_holds() -> None:
    stage = make_stage(setup_cache=8)
    tiny.step(stage, tiny.streams(*THREE))
    cache = states_of(stage, THREE)["voice-1-20"].flow_cache["estimator_att_cache"]
    kept, one_step = groups.attention_cache_bytes(stage.backend, 40)
    assert kept == cache.numel() * cache.element_size()
    assert item.transient_bytes_per_reference(stage.backend, 40) == 2 * kept + 6 * one_step


def test_a_reference_that_the_cache_holds_survives_its_eviction_while_others_are_solved() -> None:
    stage = make_stage(setup_cache=1)
    tiny.step(stage, tiny.streams("voice-9-20"))
    late = [tiny.Stream(f"l{index}", voice) for index, voice in enumerate(("voice-1-20", "voice-2-20", "voice-9-20"))]
    with solves(stage) as together:
        tiny.step(stage, late)
    assert together.sizes == [2]
    assert len(stage.backend._setup_cache) == 1


def test_duplicates_are_solved_once_beside_streams_that_run_on() -> None:
    stage = make_stage(setup_cache=1)
    old = [tiny.Stream("old0", "voice-1-20"), tiny.Stream("old1", "voice-7-20")]
    tiny.step(stage, old)
    new = [
        tiny.Stream(f"new{index}", voice)
        for index, voice in enumerate(("voice-2-20", "voice-3-20", "voice-2-20", "voice-3-20", "voice-2-20"))
    ]
    with solves(stage) as together, encodes(stage) as encoded:
        tiny.step(stage, [*old, *new])
    assert together.sizes == [2]
    assert prompt_rows(encoded) == [1, 1]
    assert all(stream.seq == 1 for stream in new)


def test_every_reference_owns_the_storage_of_its_state() -> None:
    stage = make_stage(setup_cache=8)
    tiny.step(stage, tiny.streams(*THREE))
    owners: dict[int, str] = {}
    for voice, state in states_of(stage, THREE).items():
        for value in (*state.flow_cache.values(), *state.hift_cache.values()):
            storage = value.untyped_storage()
            if not storage.nbytes():
                continue
            assert owners.setdefault(storage.data_ptr(), voice) == voice
            # Nor a view of the group's batch, which would keep all of it alive as long as one reference lives.
            assert storage.nbytes() == value.numel() * value.element_size()


def test_the_cache_is_filled_in_the_callers_order_with_the_hosts_keys() -> None:
    stock, ours = make_stage(None, setup_cache=2), make_stage(setup_cache=2)
    for stage in (stock, ours):
        tiny.step(stage, tiny.streams(*THREE))
    assert list(ours.backend._setup_cache) == list(stock.backend._setup_cache)
    assert list(ours.backend._prompt_features) == list(stock.backend._prompt_features)


def test_a_cache_of_size_zero_stays_empty() -> None:
    stage = make_stage(setup_cache=0)
    with solves(stage) as together:
        tiny.step(stage, tiny.streams(*THREE[:2]))
        tiny.step(stage, [tiny.Stream("a", THREE[0]), tiny.Stream("b", THREE[1])])
    assert together.sizes == [2, 2]
    assert not stage.backend._setup_cache


def test_a_lone_cold_reference_is_the_hosts_bit_for_bit() -> None:
    stock, ours = make_stage(None), make_stage()
    for stage in (stock, ours):
        tiny.step(stage, tiny.streams("voice-1-20", "voice-1-20"))
    expected, found = states_of(stock, THREE)["voice-1-20"], states_of(ours, THREE)["voice-1-20"]
    for name, value in expected.flow_cache.items():
        assert torch.equal(found.flow_cache[name], value)
    assert tiny.session(ours).snapshot().get(item.KEY, {}) == {}


def break_solve(stage: Any, when: Any, error: Exception) -> None:
    """Make an initial solve of the host raise ``error`` where ``when(rows)``."""
    estimator_step = stage.backend._estimator_step

    def broken(*args: Any, **kwargs: Any) -> Any:
        if kwargs["cnn_cache"] is None and when(len(kwargs["x"]) // 2):
            raise error
        return estimator_step(*args, **kwargs)

    stage.backend.__dict__["_estimator_step"] = broken


def test_a_group_that_fails_is_solved_reference_by_reference_without_encoding_again() -> None:
    stock, ours = make_stage(None, setup_cache=8), make_stage(setup_cache=8)
    tiny.step(stock, tiny.streams(*THREE))
    break_solve(ours, lambda rows: rows > 1, ValueError("odd"))
    with encodes(ours) as encoded:
        tiny.step(ours, tiny.streams(*THREE))
    assert prompt_rows(encoded) == [1, 1, 1]
    expected, found = states_of(stock, THREE), states_of(ours, THREE)
    assert list(found) == list(expected)
    for voice in THREE:
        assert torch.equal(
            found[voice].flow_cache["estimator_att_cache"], expected[voice].flow_cache["estimator_att_cache"]
        )


def test_out_of_memory_solves_fewer_at_once() -> None:
    stage = make_stage(setup_cache=8, graphs={"micro_batch_size": 4})
    break_solve(stage, lambda rows: rows > 2, torch.OutOfMemoryError("CUDA out of memory"))
    with solves(stage) as together, encodes(stage) as encoded:
        tiny.step(stage, tiny.streams(*THREE, "voice-4-20"))
    assert [size for size in together.sizes if size <= 2] == [2, 2]
    assert prompt_rows(encoded) == [1] * 4


def test_a_group_that_ran_out_of_memory_is_not_tried_each_step_and_is_told_once(
    accel_log: pytest.LogCaptureFixture,
) -> None:
    stage = make_stage(setup_cache=0, graphs={"micro_batch_size": 4})
    break_solve(stage, lambda rows: rows > 1, torch.OutOfMemoryError("CUDA out of memory"))
    for turn in range(3):
        voices = [f"voice-{seed}-20" for seed in range(4 * turn, 4 * turn + 4)]
        tiny.step(stage, [tiny.Stream(f"r{turn}-{voice}", voice) for voice in voices])
    assert tiny.session(stage).snapshot()[item.KEY]["failures"] == 2
    assert (
        len(
            [
                record
                for record in accel_log.records
                if record.levelname == "WARNING" and "as one batch" in record.getMessage()
            ]
        )
        == 1
    )


def test_a_state_and_an_encoding_are_kept_no_longer_than_they_are_of_use() -> None:
    stage = make_stage(setup_cache=0)
    step = tiny.session(stage).state(item.KEY, item._Step)
    with tiny.calls_of(stage.backend, "decode_batch", lambda *_, **__: (len(step.states), len(step.encodings))) as kept:
        tiny.step(stage, tiny.streams(*THREE))
    # A state is 0.4 GiB; the host decodes the references one after the other.
    assert kept == [(2, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize("block", [ONLY, BOTH])
def test_a_reference_that_fails_does_so_alone_with_stocks_error(block: dict[str, bool]) -> None:
    outcomes = []
    for chosen in (None, block):
        stage = make_stage(chosen, setup_cache=8)
        broken = tiny.draw_features("voice-2-20")[0]
        embedding = stage.backend.flow.input_embedding.forward

        def embed(tokens: Any, *, inner: Any = embedding, broken: Any = broken) -> Any:
            if any(torch.equal(row[:20], broken[0]) for row in tokens):
                raise ValueError("this reference is broken")
            return inner(tokens)

        stage.backend.flow.input_embedding.__dict__["forward"] = embed
        try:
            with pytest.raises(RuntimeError) as raised:
                tiny.step(stage, tiny.streams(*THREE))
        finally:
            del stage.backend.flow.input_embedding.__dict__["forward"]
        assert not stage._states
        assert not any(key[0][0] == "voice-2-20" for key in stage.backend._setup_cache)
        assert all(key[0][0] in THREE for key in stage.backend._setup_cache)
        assert not tiny.session(stage).state(item.KEY, item._Step).states
        outcomes.append(str(raised.value))
        # The good ones are served in the next step.
        tiny.step(stage, [tiny.Stream("a", THREE[0]), tiny.Stream("b", THREE[2])])
    assert outcomes[1] == outcomes[0]
    assert '"request_ids": ["r1"]' in outcomes[1]


def test_a_reference_that_cannot_be_prepared_leaves_the_others_grouped_until_its_turn() -> None:
    outcomes = []
    for block in (None, ONLY):
        stage = make_stage(block)
        stage.backend._token2wav.broken.add("voice-3-20.wav")
        with solves(stage) as together, pytest.raises(RuntimeError) as raised:
            tiny.step(stage, tiny.streams(*THREE))
        outcomes.append((str(raised.value), together.sizes))
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1] == [1, 1]
    assert outcomes[1][1] == [2]


def unsupported_policies() -> list[str]:
    return ["tensorrt", *(["no graphs", "unfused", "half", "padding", "disabled"] if WHOLE else [])]


@pytest.mark.parametrize("policy", unsupported_policies())
def test_other_execution_policies_keep_the_solve_of_one_reference(policy: str) -> None:
    stage = make_stage()
    backend = stage.backend
    if policy == "tensorrt":
        backend._trt_stepper = SimpleNamespace(step=None)
        backend._estimator_step = None
    elif policy == "no graphs":
        backend._whole_euler_graph_wrapper = None
    elif policy == "unfused":
        backend._ragged_fused_body = False
    elif policy == "half":
        backend.float16 = True
    elif policy == "disabled":
        backend._whole_euler_graph_wrapper.enabled = False
    elif policy == "padding":
        backend._cfm_graph_bucket_frames = 16  # 40 frames are padded to 48
        assert (
            item.solve_together(
                tiny.session(stage).item(item.KEY), backend, backend.prepare_prompt("v", "voice-1-20.wav")
            )
            == 1
        )
        return
    assert not item.supported(backend)
    if policy == "tensorrt":
        return
    with solves(stage) as apart:
        tiny.step(stage, tiny.streams(*THREE))
    assert apart.sizes == [1, 1, 1]


@pytest.mark.skipif(not WHOLE, reason="the host's per-step graphs refuse no batch")
class TestRefusedReplay:
    def refused(self, stage: Any) -> tuple[list[int], list[int], list[int]]:
        with solves(stage) as solved, encodes(stage) as encoded:
            tiny.step(stage, tiny.streams(*THREE))
        return solved.sizes, prompt_rows(encoded), [size for size in stage.graphs.replayed if size]

    def test_a_full_budget_keeps_the_graphs_of_one_reference_in_use(self) -> None:
        stage = make_stage(graphs={"max_graphs": 1, "micro_batch_size": 4})
        tiny.step(stage, tiny.streams("voice-8-20"))
        assert stage.graphs.captured[0] == (1, 48, 0)
        stage.on_requests_finished(["r0"])
        stage.graphs.replayed.clear()
        sizes, encoded, replayed = self.refused(stage)
        assert sizes == [1, 1, 1]
        assert encoded == [1, 1, 1]
        assert replayed[:3] == [1, 1, 1]
        assert tiny.session(stage).snapshot()[item.KEY]["refused"] == 3

    def test_a_remembered_refusal_encodes_no_reference_twice(self) -> None:
        stage = make_stage(graphs={"max_graphs": 1, "micro_batch_size": 4})
        tiny.step(stage, [tiny.Stream("first", "voice-8-20")])
        self.refused(stage)
        stage.on_requests_finished(["r0", "r1", "r2"])
        fresh = [tiny.Stream(f"n{index}", f"voice-{index + 20}-20") for index in range(3)]
        with encodes(stage) as encoded:
            tiny.step(stage, fresh)
        assert prompt_rows(encoded) == [1, 1, 1]

    def test_graphs_disabled_by_the_grouped_solve_itself(self) -> None:
        stage = make_stage(graphs={"micro_batch_size": 4})
        graphs = stage.graphs

        def disable(*_: Any, **__: Any) -> None:
            graphs.enabled = False

        graphs._capture = disable  # what a failed capture does
        sizes, encoded, _ = self.refused(stage)
        assert sizes == [1, 1, 1]
        assert encoded == [1, 1, 1]

    def test_the_hosts_wrapper_is_left_as_it_was(self) -> None:
        stage = make_stage()
        tiny.step(stage, tiny.streams(*THREE))
        assert "replay" not in vars(stage.graphs)


def test_nothing_of_a_step_outlives_it() -> None:
    stage = make_stage(setup_cache=0)
    tiny.step(stage, tiny.streams(*THREE))
    step = tiny.session(stage).state(item.KEY, item._Step)
    assert not step.states
    assert not step.cold
    assert not step.encodings
    stage.backend.__dict__["_hift_inference"] = None
    with pytest.raises(RuntimeError):
        tiny.step(stage, [tiny.Stream("a", "voice-5-20"), tiny.Stream("b", "voice-6-20")])
    assert not step.states
    assert not step.cold


def test_two_stages_of_one_process_keep_to_themselves() -> None:
    ours, off = make_stage(), make_stage({**ONLY, "cold_reference_batch": False})
    with solves(ours) as together, solves(off) as apart:
        for stage in (ours, off):
            tiny.step(stage, tiny.streams(*THREE[:2]))
    assert together.sizes == [2]
    assert apart.sizes == [1, 1]


def test_waves_that_the_operator_configured_find_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_stage(setup_cache=0, code2wav_initial_batch_size=1)
    with solves(stage) as together:
        tiny.step(stage, tiny.streams(THREE[0], THREE[1], THREE[0], THREE[1]))
    assert together.sizes == [2]


def test_setups_outside_a_step_are_the_hosts() -> None:
    stock, ours = make_stage(None), make_stage()
    states = []
    for stage in (stock, ours):
        tiny.step(stage, tiny.streams(*THREE))
        features = stage.backend.prepare_prompt("idle", "voice-5-20.wav")
        with torch.inference_mode():
            states.append(stage.backend.setup_batch(features, 1)[0])
    for name, value in states[0].flow_cache.items():
        assert torch.equal(states[1].flow_cache[name], value)


@pytest.mark.skipif(not WHOLE, reason="the host prepares nothing while idle")
def test_idle_prefetch_still_fills_the_cache_and_saves_the_first_chunk_its_setup() -> None:
    stage = make_stage(token2wav_ref_prefetch_setup=True, ref_audio_max_seconds=0.1)
    stage.backend._token2wav._prepare_prompt = lambda path: tiny.draw_features("voice-5-20")
    reference = torch.full((2400,), 0.25)
    stage.on_requests_added([SimpleNamespace(request_id="r0", payload={"ref_audio": reference, "ref_audio_sr": 24000})])
    with solves(stage) as solved:
        assert stage.run_idle_prefetch()
        assert stage.run_idle_prefetch()
        assert solved.sizes == [1]
        stream = tiny.Stream("r0", "unused")
        info = stream.info()
        info["codes"]["ref"] = reference
        info["meta"]["ref_audio_sr"] = 24000
        tiny.step(stage, [stream], [info])
        assert solved.sizes == [1]


def test_the_npu_patchs_attention_context_is_open_around_a_grouped_solve(npu_patched: list[str]) -> None:  # noqa: F811
    stage = make_stage()
    with tiny.calls_of(
        stage.backend, "_estimator_step", lambda *_, cnn_cache, **__: (list(npu_patched), cnn_cache)
    ) as calls:
        tiny.step(stage, tiny.streams(*THREE))
    contexts = [context for context, cache in calls if cache is None]
    assert len(contexts) == tiny.STEPS
    assert all(context == ["cpu"] for context in contexts)
