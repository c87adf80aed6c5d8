# SPDX-License-Identifier: Apache-2.0
"""The wrappers go on and come off, in any order with the stock NPU patches."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_speech_accel import plugin
from omni_speech_accel.plugin import binding
from omni_speech_accel.plugin.session import StageSession, attach, session_of
from omni_speech_accel.plugin.settings import resolve


@pytest.fixture(autouse=True)
def _unregistered() -> None:
    """Whatever ran before in this process, each test starts from the stock host."""
    plugin.unregister()


def core_class() -> Any:
    from vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav import StepAudio2Token2WavCore

    return StepAudio2Token2WavCore


def host_functions() -> dict[tuple[str, str], Any]:
    """Every attribute that the table or an anchor names, as the class or module holds it now."""
    import importlib

    import wrapt

    found = {}
    for module, rows in binding._handlers().items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError:
            continue  # Some hosts have no such module; the probe says so for the item.
        for _, symbol, _ in rows:
            try:
                parent, attribute, _ = wrapt.resolve_path(loaded, symbol.qualname)
            except AttributeError:
                continue
            found[module, symbol.qualname] = vars(parent)[attribute]
    return found


def test_unregister_restores_every_attribute_of_the_host() -> None:
    stock = host_functions()
    plugin.register()
    wrapped = host_functions()
    assert all(wrapped[name] is not stock[name] for name in stock)
    plugin.unregister()
    assert host_functions() == stock
    assert binding.bound() == ()


def test_a_second_register_wraps_nothing_twice(registered: None) -> None:
    before = host_functions()
    plugin.register()
    binding.install()
    assert host_functions() == before


def test_a_wrapped_constructor_keeps_its_signature(registered: None) -> None:
    # vLLM looks for `vllm_config` in it and otherwise builds the model without.
    from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav import MiniCPMO45Code2Wav

    assert list(inspect.signature(MiniCPMO45Code2Wav.__init__).parameters) == ["self", "vllm_config", "prefix"]
    assert list(inspect.signature(MiniCPMO45Code2Wav).parameters) == ["vllm_config", "prefix"]


def test_every_wrapped_function_copies_and_pickles_as_stocks(registered: None) -> None:
    core_class()
    importlib.import_module("vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav")
    importlib.import_module("vllm_omni.config.omni_config")
    records = binding.bound()
    assert records
    for record in records:
        on_the_class = getattr(record.parent, record.attribute)
        for function in (on_the_class, vars(record.parent)[record.attribute]):
            assert copy.deepcopy(function) is function
            assert copy.copy(function) is function
            for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
                assert pickle.loads(pickle.dumps(function, protocol)) == on_the_class


class Host:
    """Stands for a host class; at module level, so that pickle finds it."""

    def __init__(self) -> None:
        self.value = [1]

    def method(self) -> list[int]:
        return self.value

    @staticmethod
    def static() -> int:
        return 2


@pytest.mark.parametrize("attribute", ["method", "static"])
def test_a_wrapped_method_of_an_instance_copies_and_pickles_with_the_instance_it_needs(
    monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    symbol = SimpleNamespace(module=__name__, qualname=f"Host.{attribute}")
    monkeypatch.setattr(Host, attribute, vars(Host)[attribute])  # and back after the test
    monkeypatch.setattr(binding, "_bound", {})
    binding._bind(
        "test", symbol, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs), sys.modules[__name__]
    )  # type: ignore[arg-type]
    host = Host()
    for copied in (copy.deepcopy(getattr(host, attribute)), pickle.loads(pickle.dumps(getattr(host, attribute)))):
        assert copied() == getattr(host, attribute)()
        assert attribute == "static" or copied() is not host.value


def test_an_object_with_a_session_pickles_without_it(registered: None) -> None:
    host = Host()
    attach(host, StageSession(resolve(("t", {})), "t"))
    assert session_of(host) is not None
    saved = io.BytesIO()
    torch.save(host, saved)
    assert b"omni_speech_accel.plugin" not in saved.getvalue(), "it is read where this package is not installed"
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    assert loaded.value == [1]
    assert session_of(loaded) is None
    assert session_of(copy.deepcopy(host)) is session_of(host)


NPU_ORDER = """
    from omni_speech_accel import plugin
    from vllm_omni.model_executor.models.step_audio2 import step_audio2_token2wav as host
    from vllm_omni.platforms.npu.models import step_audio2_token2wav as npu
    core = host.StepAudio2Token2WavCore
    name = "_ensure_models_loaded"
    stock = vars(core)[name]
    calls = []

    class Loaded:
        _models_loaded = True
        device = type("D", (), {"type": "cpu"})

    def run():
        calls.clear()
        getattr(core, name)(Loaded())
"""


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_the_stock_npu_patch_survives_unregister_in_either_order(order: str) -> None:
    steps = (
        "plugin.register(); npu.apply_step_audio2_token2wav_npu_patch()"
        if order == "ours first"
        else "npu.apply_step_audio2_token2wav_npu_patch(); theirs = vars(core)[name]; plugin.register()"
    )
    code = f"""{NPU_ORDER}
    {steps}
    run()
    plugin.unregister()
    after = vars(core)[name]
    assert after is npu._patched_ensure_models_loaded, after
    run()
    plugin.register()
    plugin.register()
    run()
    depth, node = 0, vars(core)[name]
    while node is not None and depth < 20:
        depth += any("FunctionWrapper" in cls.__name__ for cls in type(node).__mro__)
        node = getattr(node, "__wrapped__", None) or (
            npu._original_ensure_models_loaded if node is npu._patched_ensure_models_loaded else None
        )
    from omni_speech_accel.plugin.table import PATCHES
    expected = sum(hook.symbol.qualname.endswith(name) for patch in PATCHES for hook in patch.hooks)
    assert depth == expected, (depth, expected)
    print("ok")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip().endswith("ok"), done.stderr[-3000:]


def make_session(block: Any, unfit: dict[str, str] | None = None) -> StageSession:
    return StageSession(resolve(("test", block)), "test", unfit)


class Counting:
    """Stands where a core stands: the binding only reads its session."""

    def __init__(self) -> None:
        self.calls = 0


def test_two_instances_in_one_process_follow_their_own_settings(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_speech_accel.items import speaker_stream
    from omni_speech_accel.plugin.table import patch_for

    seen: list[object] = []
    monkeypatch.setattr(speaker_stream, "forward_spk_embedding", lambda item, wrapped, core: seen.append(core))
    handle = binding._item_handler(patch_for("speaker_stream"), *patch_for("speaker_stream").hooks)
    on, off, bare = Counting(), Counting(), Counting()
    attach(on, make_session({}))
    attach(off, make_session({"speaker_stream": False}))
    results = [handle(lambda: "stock", owner, (), {}) for owner in (on, off, bare)]
    assert seen == [on]
    assert results == [None, "stock", "stock"]


def test_an_item_whose_code_cannot_be_imported_leaves_stock_and_says_why(accel_log: pytest.LogCaptureFixture) -> None:

    from omni_speech_accel.plugin.table import patch_for

    (hook,) = patch_for("speaker_stream").hooks
    handle = binding._item_handler(patch_for("speaker_stream"), replace(hook, wrapper="no_such_function"))
    owner = Counting()
    session = make_session({})
    session.announce()
    attach(owner, session)
    assert handle(lambda: "stock", owner, (), {}) == "stock"
    assert handle(lambda: "stock", owner, (), {}) == "stock"
    assert "no_such_function" in session.not_applied["speaker_stream"]
    assert len([record for record in accel_log.records if record.levelname == "WARNING"]) == 1


def test_a_wrapper_without_a_block_costs_microseconds(registered: None) -> None:
    # Stock's cheapest wrapped call on the request path is tens of milliseconds; 1 % of it is hundreds of microseconds.
    core = core_class()
    loaded = SimpleNamespace(_models_loaded=True)
    started = time.perf_counter()
    for _ in range(2000):
        core._ensure_models_loaded(loaded)
    each = (time.perf_counter() - started) / 2000
    assert each < 100e-6


def test_a_missing_host_symbol_leaves_its_neighbours_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_class()
    monkeypatch.delattr(core, "_forward_spk_embedding")
    plugin.register()
    try:
        names = {record.symbol.qualname for record in binding.bound()}
        assert "StepAudio2Token2WavCore._forward_spk_embedding" not in names
        assert "StepAudio2Token2WavCore._prepare_prompt" in names
    finally:
        plugin.unregister()


def test_a_method_that_is_a_property_on_this_host_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_class()
    value = object()
    monkeypatch.setattr(core, "_prepare_prompt", property(lambda self: value))
    plugin.register()
    try:
        assert core.__new__(core)._prepare_prompt is value
    finally:
        plugin.unregister()


def test_an_error_while_wrapping_never_reaches_the_hosts_import(
    monkeypatch: pytest.MonkeyPatch, accel_log: pytest.LogCaptureFixture
) -> None:
    core_class()

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(binding, "_bind", refuse)
    plugin.register()
    plugin.unregister()
    assert any("stock there" in record.getMessage() for record in accel_log.records)


def test_sessions_reach_the_objects_that_a_stage_builds(registered: None, stage_config: Any, tmp_path: Any) -> None:
    import torch

    core = core_class()
    from omni_speech_accel.plugin.session import use_session

    session = make_session({})
    with use_session(session):
        built = core(str(tmp_path), device="cpu")
    assert session_of(built) is session
    assert session_of(core(str(tmp_path), device="cpu")) is None
    assert isinstance(built, torch.nn.Module)
