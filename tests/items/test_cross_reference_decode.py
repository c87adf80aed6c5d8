# SPDX-License-Identifier: Apache-2.0
"""Rows of different references decode as one batch, and nobody can tell but by the clock."""

from __future__ import annotations

import gc
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel.items import _reference_groups as groups
from omni_speech_accel.items import cross_reference_decode as item
from tests.items import tiny_code2wav as tiny
from tests.items.tiny_code2wav import npu_patched, quiet_vocoder  # noqa: F401

ONLY = {"cross_reference_decode": True, "cold_reference_batch": False, "cold_setup_precapture": False}
FOUR = ("voice-1-20", "voice-2-20", "voice-3-20", "voice-4-20")

pytestmark = pytest.mark.usefixtures("registered", "quiet_vocoder")


@pytest.fixture
def decoded() -> Any:
    """Records the batch sizes that reach the host's decode."""
    return lambda stage: tiny.calls_of(stage.backend, "_decode_batch_once", lambda tokens, *_, **__: len(tokens))


def flow_state(stage: Any, request: str) -> dict[str, torch.Tensor]:
    state = stage._states[request].token2wav
    return {**state.flow_cache, **state.hift_cache}


@lru_cache(maxsize=1)
def host_spread() -> dict[str, float]:
    """How far the host's own results move when a stream decodes among others of its reference instead of alone."""
    crowd, alone = tiny.make_stage(), tiny.make_stage()
    many, one = tiny.streams(*["voice-1-20"] * 4), tiny.streams("voice-1-20")
    spread: dict[str, float] = {}
    for _ in range(6):
        tiny.step(crowd, many)
        tiny.step(alone, one)
        pairs = {name: (value, flow_state(alone, "r0")[name]) for name, value in flow_state(crowd, "r0").items()}
        pairs["audio"] = (many[0].audio[-1], one[0].audio[-1])
        for name, (left, right) in pairs.items():
            if left.numel():
                spread[name] = max(spread.get(name, 0.0), float((left - right).abs().max()))
    return spread


def assert_close(name: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    # One stream, six chunks: another draw of the same rounding may go somewhat further. The floor is one unit in the
    # last place of values around 1, for a cache that happened not to move at all.
    atol = max(8 * host_spread()[name], 1.2e-7)
    torch.testing.assert_close(value, expected, rtol=0.0, atol=atol, msg=lambda text: f"{name}: {text}")


def assert_same(ours: Any, stock: Any, mine: list[tiny.Stream], theirs: list[tiny.Stream]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        for audio, expected in zip(one.audio, other.audio, strict=True):
            assert_close("audio", audio, expected)
    assert ours._states.keys() == stock._states.keys()
    for request, kept in stock._states.items():
        found = ours._states[request]
        assert (found.cache_epoch, found.chunk_seq) == (kept.cache_epoch, kept.chunk_seq)
        assert (found.prompt_cache_id, found.prompt_wav) == (kept.prompt_cache_id, kept.prompt_wav)
        for name, value in flow_state(stock, request).items():
            assert_close(name, flow_state(ours, request)[name], value)


def test_different_references_decode_as_one_batch_and_sound_as_apart(decoded: Any) -> None:
    stock, ours = tiny.make_stage(), tiny.make_stage(ONLY)
    theirs, mine = tiny.streams(*FOUR), tiny.streams(*FOUR)
    with decoded(stock) as apart, decoded(ours) as together:
        for _ in range(5):
            tiny.step(stock, theirs)
            tiny.step(ours, mine)
    assert apart == [1] * 20
    assert together == [4] * 5
    assert_same(ours, stock, mine, theirs)


def test_the_comparison_would_notice_another_voice() -> None:
    stage = tiny.make_stage()
    first, second = tiny.Stream("r0", "voice-1-20"), tiny.Stream("r1", "voice-2-20")
    infos = [first.info(), {**second.info(), "codes": first.info()["codes"]}]
    audio = tiny.step(stage, [first, second], infos)
    assert float((audio[0] - audio[1]).abs().max()) > 100 * host_spread()["audio"]
    att = [flow_state(stage, name)["estimator_att_cache"] for name in ("r0", "r1")]
    assert float((att[0] - att[1]).abs().max()) > 100 * host_spread()["estimator_att_cache"]


def test_each_row_is_conditioned_on_its_own_speaker_projected_alone() -> None:
    stage = tiny.make_stage(ONLY)
    streams = tiny.streams(*FOUR)
    tiny.step(stage, streams)
    references = [stage.backend.prepare_prompt(voice, f"{voice}.wav") for voice in FOUR]
    with tiny.calls_of(stage.backend, "_estimator_step", lambda *_, speakers, **__: speakers[:4].clone()) as speakers:
        tiny.step(stage, streams)
    alone = [
        stage.backend.flow.spk_embed_affine_layer(torch.nn.functional.normalize(one.speaker_embedding, dim=1))
        for one in references
    ]
    assert torch.equal(speakers[0], torch.cat(alone))


def test_one_reference_is_decoded_bit_for_bit_as_stock(decoded: Any) -> None:
    stock, ours = tiny.make_stage(), tiny.make_stage(ONLY)
    theirs, mine = tiny.streams(*["voice-1-20"] * 4), tiny.streams(*["voice-1-20"] * 4)
    with decoded(ours) as sizes:
        for _ in range(3):
            tiny.step(stock, theirs)
            tiny.step(ours, mine)
    assert sizes == [4] * 3
    for one, other in zip(mine, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.audio, other.audio, strict=True))
    assert tiny.session(ours).snapshot().get(item.KEY, {}) == {}


def test_a_bucket_without_a_partner_is_decoded_bit_for_bit_as_stock() -> None:
    stock, ours = tiny.make_stage(), tiny.make_stage(ONLY)
    runs = []
    for stage in (stock, ours):
        streams = tiny.streams("voice-1-20", "voice-2-30", "voice-2-30")
        features = tiny.calls_of(stage.backend, "_decode_batch_once", lambda tokens, features, *_, **__: features)
        with features as seen:
            tiny.step(stage, streams)
            tiny.step(stage, streams)
        runs.append((streams, seen))
    assert all(groups.rows_of(features) is None for features in runs[1][1])
    for one, other in zip(runs[1][0], runs[0][0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.audio, other.audio, strict=True))


def test_no_block_no_item(decoded: Any) -> None:
    stage = tiny.make_stage()
    with decoded(stage) as sizes:
        tiny.step(stage, tiny.streams(*FOUR))
    assert sizes == [1] * 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("prompt length", [2, 2]),
        ("token count", [2, 2]),
        ("last chunk", [2, 2]),
        ("epoch", [2, 2]),
        ("position", [2, 2]),
    ],
)
def test_rows_join_only_where_every_shape_is_equal(change: str, expected: list[int], decoded: Any) -> None:
    voices = list(FOUR)
    if change == "prompt length":
        voices[2:] = ["voice-3-24", "voice-4-24"]
    stock, ours = tiny.make_stage(), tiny.make_stage(ONLY)
    runs = []
    for stage in (stock, ours):
        streams = tiny.streams(*voices)
        if change == "epoch":
            for stream in streams[2:]:
                stream.epoch = 1
        if change == "position":
            tiny.step(stage, streams)
            tiny.step(stage, streams[2:])
        width = 9 if change == "token count" else 8
        infos = [stream.info() for stream in streams[:2]]
        infos += [stream.info(width=width, last=change == "last chunk") for stream in streams[2:]]
        with decoded(stage) as sizes:
            tiny.step(stage, streams, infos)
        runs.append((streams, sizes))
    assert runs[0][1] == [1] * 4
    assert runs[1][1] == expected
    assert_same(ours, stock, runs[1][0], runs[0][0])


def test_streams_start_end_and_turn_over_as_in_stock() -> None:
    stock, ours = tiny.make_stage(), tiny.make_stage(ONLY)
    runs = []
    for stage in (stock, ours):
        old = tiny.streams(*FOUR)
        tiny.step(stage, old)
        late = [tiny.Stream("late0", "voice-5-20"), tiny.Stream("late1", "voice-6-20")]
        tiny.step(stage, [*old, *late])
        tiny.step(stage, old, [stream.info(last=index < 2) for index, stream in enumerate(old)])
        for stream in old[2:]:
            stream.epoch, stream.seq = 1, 0
        tiny.step(stage, [*old[2:], *late])
        stage.on_requests_finished(["late0"])
        runs.append([*old, *late])
    assert set(ours._states) == {"r2", "r3", "late1"}
    assert_same(ours, stock, runs[1], runs[0])


def test_caches_hold_what_they_hold_in_stock() -> None:
    stock, ours = tiny.make_stage(setup_cache=3), tiny.make_stage(ONLY, setup_cache=3)
    for stage in (stock, ours):
        streams = tiny.streams(*FOUR)
        tiny.step(stage, streams)
        tiny.step(stage, streams)
    assert list(ours.backend._setup_cache) == list(stock.backend._setup_cache)
    assert list(ours.backend._prompt_features) == list(stock.backend._prompt_features)
    assert all(groups.rows_of(features) is None for features in ours.backend._prompt_features.values())
    assert ours.backend._token2wav.prepared == stock.backend._token2wav.prepared


def test_runtime_references_are_owned_and_evicted_as_in_stock() -> None:
    def named(stage: Any) -> None:
        # The stage writes a request's reference to a file named by its content; the features come from the samples.
        def prepare(path: str) -> Any:
            import soundfile

            seed = int(abs(float(soundfile.read(path)[0][0])) * 1000)
            return tiny.draw_features(f"voice-{seed}-20.wav")

        stage.backend._token2wav._prepare_prompt = prepare

    stock = tiny.make_stage(token2wav_runtime_prompt_cache_size=1, ref_audio_max_seconds=0.1)
    ours = tiny.make_stage(ONLY, token2wav_runtime_prompt_cache_size=1, ref_audio_max_seconds=0.1)
    for stage in (stock, ours):
        named(stage)
        streams = [tiny.Stream(f"r{index}", "unused") for index in range(3)]
        infos = []
        for index, stream in enumerate(streams):
            info = stream.info()
            info["codes"]["ref"] = torch.full((2400,), 0.1 * (index + 1))
            info["meta"]["ref_audio_sr"] = 24000
            infos.append(info)
        tiny.step(stage, streams, infos)
        assert len(stage._runtime_prompts) == 3
        stage.on_requests_finished(["r0", "r1"])
    assert list(ours._runtime_prompts) == list(stock._runtime_prompts)
    assert len(ours._runtime_prompts) == 1
    assert [key[0] for key in ours.backend._prompt_features] == [key[0] for key in stock.backend._prompt_features]


def test_configured_waves_stay_the_hosts(decoded: Any) -> None:
    stage = tiny.make_stage(ONLY, code2wav_initial_batch_size=2)
    with decoded(stage) as sizes:
        tiny.step(stage, tiny.streams(*FOUR))
    assert sizes == [1] * 4


def test_the_configured_maximum_bounds_a_batch(decoded: Any) -> None:
    block = {**ONLY, "cross_reference_decode": {"max_batch": 3}}
    stage = tiny.make_stage(block)
    with decoded(stage) as sizes:
        tiny.step(stage, tiny.streams(*FOUR))
    assert sizes == [3, 1]


def test_memory_bounds_a_batch(decoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item, "transient_bytes_per_row", lambda *_: 30 << 20)
    stage = tiny.make_stage({**ONLY, "cross_reference_decode": {"max_memory_mib": 64}})
    with decoded(stage) as sizes:
        tiny.step(stage, tiny.streams(*FOUR))
    assert sizes == [2, 2]


def test_free_memory_bounds_a_batch_where_no_cap_is_set(decoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item, "transient_bytes_per_row", lambda *_: 10 << 20)
    monkeypatch.setattr(groups, "accelerator_for", lambda device: SimpleNamespace(memory_free=lambda device: 60 << 20))
    stage = tiny.make_stage(ONLY)
    with decoded(stage) as sizes:
        tiny.step(stage, tiny.streams(*FOUR))
    assert sizes == [3, 1]


def test_the_memory_formula_counts_the_caches_of_a_decode() -> None:
    stage = tiny.make_stage(ONLY)
    stream = tiny.Stream("r0", "voice-1-20")
    tiny.step(stage, [stream])
    cache = stage._states["r0"].token2wav.flow_cache["estimator_att_cache"]
    frames = int(cache.shape[4])
    kept, one_step = groups.attention_cache_bytes(stage.backend, frames)
    assert kept == cache.numel() * cache.element_size()
    assert one_step == kept // tiny.STEPS


def test_sizes_are_powers_of_two_where_each_size_costs_graphs(decoded: Any) -> None:
    stage = tiny.make_stage(ONLY)
    streams = tiny.streams(*(f"voice-{seed}-20" for seed in range(7)))
    tiny.step(stage, streams)
    tiny.simulate_step_graphs(stage)
    with decoded(stage) as sizes:
        tiny.step(stage, streams)
    assert sizes == [4, 2, 1]


@pytest.mark.skipif(not tiny.has_whole_solve_graphs(), reason="the host has no whole-solve graphs")
class TestWholeSolveGraphs:
    def test_rows_join_up_to_the_largest_graphed_batch(self, decoded: Any) -> None:
        stock, ours = tiny.make_stage(), tiny.make_stage(ONLY)
        runs = []
        for stage in (stock, ours):
            graphs = tiny.simulate_whole_solve_graphs(stage, micro_batch_size=2, max_graph_batch=3)
            streams = tiny.streams(*FOUR)
            with decoded(stage) as sizes:
                tiny.step(stage, streams)
                tiny.step(stage, streams)
            runs.append((streams, sizes, graphs))
        assert runs[1][1] == [3, 1, 3, 1]
        assert runs[1][2].replayed[-2:] == [3, 1]
        assert_same(ours, stock, runs[1][0], runs[0][0])

    def test_a_failure_after_a_replay_is_not_repeated_on_moved_caches(self, decoded: Any) -> None:
        stage = tiny.make_stage(ONLY)
        tiny.simulate_whole_solve_graphs(stage)
        streams = tiny.streams(*FOUR)
        tiny.step(stage, streams)
        stage.backend.__dict__["_hift_inference"] = failing(RuntimeError("vocoder"), above=0)
        with decoded(stage) as sizes, pytest.raises(RuntimeError, match="vocoder") as raised:
            tiny.step(stage, streams)
        assert sizes == [4]
        assert all(f'"{name}"' in str(raised.value) for name in ("r0", "r1", "r2", "r3"))


def failing(error: Exception, *, above: int) -> Any:
    """A vocoder that raises ``error`` for batches of more than ``above`` rows, and is silent for others."""

    def inference(mel: torch.Tensor, source: torch.Tensor) -> Any:
        if mel.shape[0] > above:
            raise error
        samples = mel.shape[2] * tiny.SAMPLES_PER_FRAME
        return mel.new_zeros((mel.shape[0], samples)), mel.new_zeros((mel.shape[0], 1, samples))

    return inference


def test_a_failing_joined_batch_is_decoded_as_the_hosts_own(decoded: Any) -> None:
    stock, ours = tiny.make_stage(), tiny.make_stage(ONLY)
    runs = []
    for stage in (stock, ours):
        streams = tiny.streams("voice-1-20", "voice-2-20", "voice-2-20")
        tiny.step(stage, streams)
        stage.backend.__dict__["_hift_inference"] = failing(ValueError("odd"), above=2)
        with decoded(stage) as sizes:
            tiny.step(stage, streams)
        runs.append((streams, sizes))
    assert runs[1][1] == [3, 1, 2]
    assert_same(ours, stock, runs[1][0], runs[0][0])
    assert tiny.session(ours).snapshot()[item.KEY]["failures"] == 1


def test_out_of_memory_halves_the_batch_before_it_falls_apart(decoded: Any) -> None:
    stage = tiny.make_stage(ONLY)
    streams = tiny.streams(*(f"voice-{seed}-20" for seed in range(8)))
    tiny.step(stage, streams)
    before = {stream.request: stage._states[stream.request] for stream in streams}
    stage.backend.__dict__["_hift_inference"] = failing(torch.OutOfMemoryError("CUDA out of memory"), above=2)
    with decoded(stage) as sizes:
        tiny.step(stage, streams)
    assert sizes == [8, 4, 2, 2, 4, 2, 2]
    assert all(stage._states[name].chunk_seq == kept.chunk_seq + 1 for name, kept in before.items())


def test_a_size_that_ran_out_of_memory_is_not_tried_each_step_and_is_told_once(
    decoded: Any, accel_log: pytest.LogCaptureFixture
) -> None:
    stage = tiny.make_stage(ONLY)
    streams = tiny.streams(*(f"voice-{seed}-20" for seed in range(4)))
    tiny.step(stage, streams)
    stage.backend.__dict__["_hift_inference"] = failing(torch.OutOfMemoryError("CUDA out of memory"), above=1)
    with decoded(stage) as sizes:
        for _ in range(3):
            tiny.step(stage, streams)
    assert sizes == [4, 2, 1, 1, 2, 1, 1] + [1] * 4 + [1] * 4
    told = [
        record
        for record in accel_log.records
        if record.levelname == "WARNING" and "as one batch" in record.getMessage()
    ]
    assert len(told) == 1
    assert "out of memory" in told[0].getMessage()
    # Memory may have come back by and by.
    stage.backend.__dict__["_hift_inference"] = failing(torch.OutOfMemoryError("CUDA out of memory"), above=99)
    tiny.session(stage).state(f"{item.KEY} back-off", groups.BackOff)._steps = 1
    with decoded(stage) as sizes:
        tiny.step(stage, streams)
    assert sizes == [4]


def test_only_the_failing_requests_are_named_and_nothing_is_published() -> None:
    messages = []
    for block in (None, ONLY):
        stage = tiny.make_stage(block)
        streams = tiny.streams("voice-1-20", "voice-2-20", "voice-2-20", "voice-3-20")
        tiny.step(stage, streams)
        bad = stage._states["r1"].token2wav
        decode_once = stage.backend._decode_batch_once

        def broken(
            tokens: Any, features: Any, states: Any, *, bad: Any = bad, once: Any = decode_once, **kw: Any
        ) -> Any:
            if any(state is bad for state in states):
                raise ValueError("this stream is broken")
            return once(tokens, features, states, **kw)

        stage.backend.__dict__["_decode_batch_once"] = broken
        before = dict(stage._states)
        with pytest.raises(RuntimeError) as raised:
            tiny.step(stage, streams)
        assert stage._states == before
        messages.append(str(raised.value))
    assert messages[1] == messages[0]
    assert '"request_ids": ["r1", "r2"]' in messages[1]


def test_a_reference_that_cannot_be_prepared_fails_with_stocks_error() -> None:
    messages = []
    for block in (None, ONLY):
        stage = tiny.make_stage(block)
        stage.backend._token2wav.broken.add("voice-2-20.wav")
        with pytest.raises(RuntimeError) as raised:
            tiny.step(stage, tiny.streams(*FOUR))
        assert not stage._states
        messages.append(str(raised.value))
        # The same references, without the broken one, are served afterwards.
        tiny.step(stage, [tiny.Stream("again0", FOUR[0]), tiny.Stream("again1", FOUR[2])])
    assert messages[1] == messages[0]


def test_of_two_broken_requests_the_one_that_stock_meets_first_is_named() -> None:
    """The second reference cannot be read; the third, whose row would join the first's, has no such codec token."""
    messages = []
    for block in (None, ONLY, True):
        stage = tiny.make_stage(block)
        stage.backend._token2wav.broken.add("voice-2-20.wav")
        streams = tiny.streams("voice-1-20", "voice-2-20", "voice-3-20")
        infos = [stream.info() for stream in streams]
        infos[2]["codes"]["audio"][0] = 999_999
        with pytest.raises(RuntimeError) as raised:
            tiny.step(stage, streams, infos)
        messages.append(str(raised.value))
    assert '"request_ids": ["r1"]' in messages[0]
    assert messages[1:] == messages[:1] * 2


def test_a_setup_that_fails_fails_with_stocks_error() -> None:
    messages = []
    for block in (None, ONLY):
        stage = tiny.make_stage(block)
        create = stage.backend._create_initial_states

        def broken(features: Any, batch_size: int, *, create: Any = create) -> Any:
            if features.cache_key[0] == "voice-3-20":
                raise ValueError("no state for this one")
            return create(features, batch_size)

        stage.backend.__dict__["_create_initial_states"] = broken
        with pytest.raises(RuntimeError) as raised:
            tiny.step(stage, tiny.streams(*FOUR))
        messages.append(str(raised.value))
    assert messages[1] == messages[0]


def test_an_abandoned_step_leaves_nothing_for_the_next_prepare() -> None:
    stage = tiny.make_stage(ONLY)
    streams = tiny.streams(*FOUR)
    tiny.step(stage, streams)
    batches = stage._iter_decode_batches([[work] for work in work_items(stage, streams)])
    rows = next(iter(batches))
    assert len(rows) == 4
    key = (rows[0].prompt_cache_id, rows[0].prompt_wav)
    del batches
    gc.collect()
    assert groups.rows_of(stage.backend.prepare_prompt(*key)) is None


def test_only_the_next_prepare_gets_the_joined_features() -> None:
    stage = tiny.make_stage(ONLY)
    streams = tiny.streams(*FOUR)
    tiny.step(stage, streams)
    batches = iter(stage._iter_decode_batches([[work] for work in work_items(stage, streams)]))
    rows = next(batches)
    key = (rows[0].prompt_cache_id, rows[0].prompt_wav)
    assert len(groups.rows_of(stage.backend.prepare_prompt(*key)) or ()) == 4
    assert groups.rows_of(stage.backend.prepare_prompt(*key)) is None
    batches.close()


def work_items(stage: Any, streams: list[tiny.Stream]) -> list[Any]:
    return [
        stage._parse_item(index, stream.request, stream.info()["codes"]["audio"], stream.info())
        for index, stream in enumerate(streams)
    ]


def test_two_stages_of_one_process_keep_to_themselves(decoded: Any) -> None:
    ours, off = tiny.make_stage(ONLY), tiny.make_stage({**ONLY, "cross_reference_decode": False})
    mine, others = tiny.streams(*FOUR), tiny.streams(*FOUR)
    with decoded(ours) as joined, decoded(off) as apart:
        for _ in range(2):
            tiny.step(ours, mine)
            tiny.step(off, others)
    assert joined == [4, 4]
    assert apart == [1] * 8


def test_the_npu_patchs_attention_context_is_open_around_a_joined_decode(npu_patched: list[str]) -> None:  # noqa: F811
    stage = tiny.make_stage(ONLY)
    streams = tiny.streams(*FOUR)
    tiny.step(stage, streams)
    with tiny.calls_of(stage.backend, "_estimator_step", lambda *_, **__: list(npu_patched)) as contexts:
        tiny.step(stage, streams)
    assert contexts == [["cpu"]] * tiny.STEPS
