# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_speech_accel import runtime
from omni_speech_accel.items import stop_index_cache
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.session import use_session
from omni_speech_accel.plugin.table import patch_for
from tests.items.conftest import only, session_for

KEY = "stop_index_cache"
FIT = fit(patch_for(KEY))


def test_a_host_without_the_function_is_told() -> None:
    # 0.30.0 rebuilds no index per frame: the item is not applied there and says why.
    assert FIT.applies or "talker_codec_sample" in FIT.reason


if FIT.applies:
    from vllm_omni.model_executor.models.minicpmo_4_5 import talker_codec_sample as talker

    def state(step: int) -> Any:
        return talker.make_device_state(torch.tensor([1, 2, 3]), step=step, max_tokens=10, finished=False)

    @settings(max_examples=60, deadline=None)
    @given(
        stop_ids=st.lists(st.integers(0, 6561), min_size=1, max_size=5, unique=True).map(tuple),
        step=st.integers(0, 4),
        masked=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 1000),
    )
    def test_every_logit_is_stocks(
        stop_ids: tuple[int, ...], step: int, masked: bool, dtype: torch.dtype, seed: int
    ) -> None:
        logits = torch.randn(1, talker.VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)
        arguments = (logits, state(step), torch.tensor([2]))
        keywords = {"stop_ids": stop_ids, "eos_window_masked": masked}
        stock = talker._censor_stop_logits(*arguments, **keywords)
        session = session_for(only(KEY))
        for _ in range(2):
            on = stop_index_cache.censor_stop_logits(
                session.item(KEY), talker._censor_stop_logits, None, *arguments, **keywords
            )
            assert on.dtype == stock.dtype
            assert torch.equal(on, stock)
        assert session.counters(KEY).snapshot() == {"misses": 1, "hits": 1}

    def test_the_sampling_functions_reach_the_cache_of_the_current_stage(registered: None) -> None:
        session, other = session_for(only(KEY)), session_for(only())
        logits = torch.randn(1, talker.VOCAB_SIZE)
        keywords: dict[str, Any] = {"stop_ids": (6561,), "eos_window_masked": False}
        results = []
        for current in (None, session, other):
            with use_session(current):
                results.append(talker._filter_codec_logits(logits, state(0), torch.tensor([5]), **keywords))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert session.counters(KEY).snapshot() == {"misses": 1}
        assert other.snapshot() == {}

    def test_the_talker_makes_its_session_current_while_it_samples(registered: None) -> None:
        from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_omni_tts import (
            MiniCPMO45OmniTTSForConditionalGeneration as Talker,
        )

        from omni_speech_accel.anchors.stages import with_session
        from omni_speech_accel.plugin.session import attach, current_session

        owner = Talker.__new__(Talker)
        owner.__dict__["_modules"] = {}
        session = session_for(only(KEY))
        attach(owner, session)
        seen = with_session(lambda: current_session(), owner, (), {})
        assert seen is session
        assert current_session() is None


def test_the_cache_is_bounded_and_never_drops_what_a_graph_may_read() -> None:
    cache = stop_index_cache.StopIndexCache(max_entries=2)
    device = torch.device("cpu")
    first = cache.make((1,), device)
    assert cache.make((2,), device) is not None
    assert cache.make((3,), device) is None
    assert len(cache) == 2
    assert cache.find((1,), device) is first


def test_a_full_cache_calls_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_for(only(KEY))
    session.state(KEY, lambda: stop_index_cache.StopIndexCache(max_entries=0))
    result = stop_index_cache.censor_stop_logits(
        session.item(KEY),
        lambda *args, **kwargs: "stock",
        None,
        torch.zeros(1, 4),
        None,
        None,
        stop_ids=(1,),
        eos_window_masked=True,
    )
    assert result == "stock"
    assert session.counters(KEY).snapshot() == {"misses": 1, "eager": 1}


def test_devices_and_stop_sets_do_not_mix() -> None:
    cache = stop_index_cache.StopIndexCache()
    cpu = cache.make((1, 2), torch.device("cpu"))
    meta = cache.make((1, 2), torch.device("meta"))
    assert cpu is not None
    assert meta is not None
    assert (cpu.device.type, meta.device.type) == ("cpu", "meta")
    assert cache.find((2, 1), torch.device("cpu")) is None


def test_an_index_made_under_inference_mode_serves_callers_outside_it() -> None:
    cache = stop_index_cache.StopIndexCache()
    with torch.inference_mode():
        made = cache.make((0,), torch.device("cpu"))
    assert made is not None
    assert not made.is_inference()
    logits = torch.randn(1, 4, requires_grad=True)
    logits.index_select(-1, made).sum().backward()


def test_threads_share_one_index() -> None:
    cache = stop_index_cache.StopIndexCache()
    made: list[Any] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        made.append(cache.make((5, 6), torch.device("cpu")))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(value) for value in made}) == 1


def test_nothing_is_kept_from_inside_a_capture(device: Any) -> None:
    from tests.simulator import DEVICE

    session = session_for(only(KEY))
    logits = torch.zeros(1, 4, device=DEVICE)
    runtime.accelerator_for(DEVICE).prepare_capture(DEVICE)
    with device.use_stream(device.create_stream()):
        device.begin_capture()
        try:
            result = stop_index_cache.censor_stop_logits(
                session.item(KEY),
                lambda *args, **kwargs: "stock",
                None,
                logits,
                None,
                None,
                stop_ids=(1,),
                eos_window_masked=True,
            )
        finally:
            device.end_capture()
    assert result == "stock"
    assert len(session.state(KEY, stop_index_cache.StopIndexCache)) == 0
