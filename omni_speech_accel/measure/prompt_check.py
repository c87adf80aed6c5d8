# SPDX-License-Identifier: Apache-2.0
"""Prompt features of many references, item on against item off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_speech_accel.measure.check import Check, block_of
from omni_speech_accel.measure.compare import Difference, compare
from omni_speech_accel.measure.driver import PromptDriver
from omni_speech_accel.measure.workbench import Outcome, Workbench, acted, refusal
from omni_speech_accel.plugin.table import patch_for

if TYPE_CHECKING:
    import torch

Answers = dict[str, dict[str, "torch.Tensor"]]

# A graph item captures a length when it first sees it and replays it from then on; both must be right.
_PASSES = 2


def _answers(bench: Workbench, driver: PromptDriver, arm: str) -> Answers:
    """Features by reference. They are small: the longest reference's are 0.5 MB."""
    found = {}
    for name, path in bench.references:
        bench.progress(f"{arm}: {name}")
        found[name] = driver.features(path)
    return found


def _stock(bench: Workbench, beside: tuple[str, ...]) -> Answers:
    driver = PromptDriver(bench.model, bench.platform, block=block_of(*beside) if beside else None)
    try:
        return _answers(bench, driver, " + ".join(("stock", *beside)))
    finally:
        driver.close()


def check_prompt_features(bench: Workbench, item: str, check: Check) -> Outcome:
    """Compare every feature of every reference, where the item first sees its length and where it sees it again."""
    expected: Answers = bench.once(("features", check.beside), lambda: _stock(bench, check.beside))
    driver = PromptDriver(bench.model, bench.platform, block=block_of(*check.beside, item))
    differences: list[Difference] = []
    try:
        session = driver.session
        for number in range(_PASSES if check.acted == ("replays",) else 1):
            found = _answers(bench, driver, item)
            for name, features in found.items():
                label = f"{name}, again" if number else name
                differences += [
                    compare(
                        f"{label}: {what}", expected[name][what], value, patch_for(item).tolerance(what, bench.platform)
                    )
                    for what, value in features.items()
                ]
        refused, native = refusal(session, item)
        counters = session.snapshot().get(item, {})
    finally:
        driver.close()
    return Outcome(
        tuple(differences), refused, native, acted(counters, check.acted) or not check.acted, counters=counters
    )
