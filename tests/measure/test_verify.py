# SPDX-License-Identifier: Apache-2.0
"""Verdicts of `verify`: on made-up outcomes, and on the real host with the real items, sound and broken."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_speech_accel.errors import UsageError
from omni_speech_accel.measure import stream_check, verify
from omni_speech_accel.measure.check import Check
from omni_speech_accel.measure.checks import CHECKS
from omni_speech_accel.measure.compare import Difference
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.measure.verify import ItemResult, VerifyReport, select_items
from omni_speech_accel.measure.workbench import Outcome, Workbench
from omni_speech_accel.plugin.fit import Fit, fit
from omni_speech_accel.plugin.table import patch_for
from omni_speech_accel.synthetic.references import reference_files

GOOD = Difference("mel", True, 0.0, 0.0, 1.0, 0, 10, "bit-exact")
BAD = Difference("speaker embedding", False, 0.5, 0.1, 0.9, 3, 192, "relative <= 2e-05")


def verdict(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome | Exception, *, asked: bool = False, platform: str = "cpu"
) -> ItemResult:
    """What verify makes of an outcome of ``sync_free_prompt``."""

    def run(bench: Workbench, item: str, check: Check) -> Outcome:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(verify, "CHECKS", {"sync_free_prompt": Check(run)})
    bench = Workbench(Path("unused"), platform, StageProfile("test"))
    (result,) = verify.verify(bench, [patch_for("sync_free_prompt")], asked=asked).results
    return result


def test_equal_outputs_of_an_item_that_acted_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verdict(monkeypatch, Outcome((GOOD,)))
    assert (result.status, result.ok) == ("passed", True)


def test_one_difference_among_many_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verdict(monkeypatch, Outcome((GOOD, BAD, GOOD)))
    assert (result.status, result.ok) == ("failed", False)
    assert result.worst == BAD
    assert "1 of 3 comparisons differ; speaker embedding: relative 0.1" in result.reason


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome((GOOD,), acted=False), "did not act"),
        (Outcome(()), "nothing was shown"),
        (Outcome((GOOD,), refused="CampplusParityError: too far"), "not applied: CampplusParityError"),
        (Outcome((GOOD,), counters={"failures": 2.0}), "2 failures"),
        (ZeroDivisionError("boom"), "ZeroDivisionError: boom (test_verify.py:"),
    ],
)
def test_what_proves_nothing_or_broke_fails(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome | Exception, words: str
) -> None:
    result = verdict(monkeypatch, outcome)
    assert (result.status, result.ok) == ("failed", False)
    assert words in result.reason


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome((GOOD,), refused="the host's own CampplusTorch is used", host_native=True), "not applied"),
        (Outcome((GOOD,), acted=False, idle="no graphs in this stage"), "not run"),
    ],
)
def test_what_cannot_be_shown_here_is_not_passed_and_fails_only_where_it_was_named(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, status: str
) -> None:
    result = verdict(monkeypatch, outcome)
    assert (result.status, result.ok) == (status, True)
    assert not verdict(monkeypatch, outcome, asked=True).ok


def test_what_was_not_reached_when_the_run_was_stopped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(bench: Workbench, item: str, check: Check) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        verify,
        "CHECKS",
        {"stop_index_cache": Check(lambda bench, item, check: Outcome((GOOD,))), "sync_free_prompt": Check(stopped)},
    )
    monkeypatch.setattr(verify, "fit", lambda patch, **how: Fit(True))
    patches = [patch_for(key) for key in ("stop_index_cache", "sync_free_prompt")]
    report = verify.verify(Workbench(Path("unused"), "cpu", StageProfile("test")), patches, asked=False)
    assert [result.status for result in report.results] == ["passed", "failed"]
    assert report.results[1].reason == "stopped before it was checked"
    assert (report.ok, report.failed) == (False, ("sync_free_prompt",))


def test_an_item_for_another_device_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench(Path("unused"), "cpu", StageProfile("test"))
    for asked in (False, True):
        (result,) = verify.verify(bench, [patch_for("s3_graph")], asked=asked).results
        assert result.status == "not run"
        assert "needs cuda or npu: not run here (cpu)" in result.reason
        assert result.ok is not asked


def test_an_item_that_does_not_fit_the_host_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "fit", lambda patch, **how: Fit(False, "the host has no such symbol"))
    bench = Workbench(Path("unused"), "cpu", StageProfile("test"))
    (result,) = verify.verify(bench, [patch_for("sync_free_prompt")], asked=False).results
    assert (result.status, result.reason) == ("not applied", "the host has no such symbol")


def test_unknown_item_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="unknown item speaker_devise; did you mean speaker_device"):
        select_items(["speaker_devise"])


def test_report_is_json_without_infinities(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Difference("mel", False, math.inf, math.inf, 0.0, 1, 1, "bit-exact", "shape")
    result = verdict(monkeypatch, Outcome((endless,)))
    report = VerifyReport("1", "host", "cpu", "model", "profile", (result,), 1.0)
    for every in (False, True):
        found = json.loads(report.as_json(every_comparison=every), parse_constant=lambda name: pytest.fail(name))
        assert found["ok"] is False
        assert found["failed"] == ["sync_free_prompt"]
        assert found["results"][0]["worst"]["max_abs"] is None
        assert ("differences" in found["results"][0]) is every


@pytest.fixture(scope="module")
def bench(
    platform: str, profile: StageProfile, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Workbench:
    """Two short references, so that a check takes seconds."""
    found = [
        (name, path)
        for name, path in reference_files(tmp_path_factory.mktemp("references"), quick=True)
        if name.startswith(("1 s", "2.5 s"))
    ]
    assert len(found) == 2
    return Workbench(small_checkpoint, platform, profile, tuple(found))


def check(bench: Workbench, item: str) -> ItemResult:
    (result,) = verify.verify(bench, [patch_for(item)], asked=True).results
    return result


def test_speaker_device_passes_with_trained_weights_on_one_thread(
    bench: Workbench, trained: dict[str, Path], tmp_path: Path
) -> None:
    """Trained weights on one thread are where a tolerance set from random ones refused a right model."""
    model = tmp_path / "model"
    shutil.copytree(bench.model, model, symlinks=True)
    shutil.copy(trained["folded-13"], model / "assets" / "token2wav" / "campplus.onnx")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = check(Workbench(model, bench.platform, bench.profile, bench.references), "speaker_device")
    finally:
        torch.set_num_threads(before)
    assert (result.status, result.reason) == ("passed", "")
    assert result.worst is not None
    assert result.worst.relative > 0.0  # our network answered, not stock's session


@pytest.mark.parametrize("item", ["sync_free_prompt", "speaker_device"])
def test_a_prompt_item_passes_on_the_real_host(bench: Workbench, item: str) -> None:
    result = check(bench, item)
    assert (result.status, result.reason) == ("passed", "")
    assert result.comparisons == 2 * 5


@pytest.mark.skipif(not fit(patch_for("stop_index_cache")).applies, reason="this host rebuilds no stop index")
def test_stop_index_cache_passes_on_the_real_host(bench: Workbench) -> None:
    result = check(bench, "stop_index_cache")
    assert (result.status, result.reason) == ("passed", "")
    assert result.counters["hits"] > 0


def test_decoding_of_different_voices_passes_on_the_real_host(bench: Workbench) -> None:
    result = check(bench, "cross_reference_decode")
    assert (result.status, result.reason) == ("passed", "")
    assert result.comparisons > 50


def perturb(model: Any) -> None:
    """One percent on the largest weight of our CAM++."""
    weights = [value for value in (*model.model.buffers(), *model.model.parameters()) if value.is_floating_point()]
    with torch.no_grad():
        max(weights, key=lambda value: value.numel()).mul_(1.01)


def _broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Perturb what ``models.campplus.<name>`` returns, on a model of this test's own."""
    from omni_speech_accel.campplus import model as campplus

    original: Callable[..., Any] = getattr(campplus, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        perturb(model)
        return model

    monkeypatch.setattr(campplus, "_loaded", {})
    monkeypatch.setattr(campplus, name, wrapped)


def test_a_weight_wrong_by_one_percent_before_the_gate_fails_as_not_applied(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(monkeypatch, "build_campplus")
    result = check(bench, "speaker_device")
    assert (result.item, result.status, result.ok) == ("speaker_device", "failed", False)
    assert "not applied: CampplusParityError" in result.reason


def test_a_weight_wrong_by_one_percent_after_the_gate_fails_by_its_difference(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(monkeypatch, "load_campplus")
    result = check(bench, "speaker_device")
    assert (result.item, result.status, result.ok) == ("speaker_device", "failed", False)
    assert "speaker embedding" in result.reason
    assert result.worst is not None
    assert result.worst.relative > 2e-5


def test_a_dead_hook_fails_instead_of_passing_as_stock(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_speech_accel.items import sync_free_prompt

    monkeypatch.setattr(sync_free_prompt, "prepare_prompt", lambda item, wrapped, core, prompt_wav: wrapped(prompt_wav))
    from omni_speech_accel import plugin
    from omni_speech_accel.plugin import binding

    for record in binding.bound():
        if record.attribute == "_prepare_prompt":
            monkeypatch.setattr(record, "enabled", False)
    assert plugin.is_registered()
    result = check(bench, "sync_free_prompt")
    assert result.status == "failed"
    assert "did not act" in result.reason


def test_a_row_that_decodes_another_streams_tokens_fails(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arms see the same payloads; the item's arm decodes one stream's chunk with one token changed."""
    original = stream_check.Code2WavDriver

    class Mistaken(original):  # type: ignore[misc, valid-type]
        def step(self, payloads: Any) -> Any:
            from dataclasses import replace

            if self.session.settings.present:
                payloads = [
                    replace(one, codes=(one.codes[0] ^ 1, *one.codes[1:])) if one.stream == "second" else one
                    for one in payloads
                ]
            return super().step(payloads)

    monkeypatch.setattr(stream_check, "Code2WavDriver", Mistaken)
    result = check(bench, "cross_reference_decode")
    assert result.status == "failed"
    assert "second, chunk" in result.reason


def test_the_checks_table_is_what_verify_uses() -> None:
    assert verify.CHECKS is CHECKS
