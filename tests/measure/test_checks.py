# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest

from omni_speech_accel.measure.abba import PHASES
from omni_speech_accel.measure.check import block_of
from omni_speech_accel.measure.checks import CHECKS
from omni_speech_accel.plugin.settings import parse_block
from omni_speech_accel.plugin.table import PATCHES


def test_every_item_of_the_table_has_a_check() -> None:
    assert set(CHECKS) == {patch.key for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.key)
def test_the_checked_tolerance_is_the_stated_one(patch: object) -> None:
    """`relative ... N` in the row's parity text is the number that verify holds the item to."""
    parity, check = patch.parity, CHECKS[patch.key]  # type: ignore[attr-defined]
    bounds = [tolerance.relative for tolerance in check.tolerances.values()]
    stated = [float(number) for number in re.findall(r"\d+(?:\.\d+)?e-\d+", parity)]
    if bounds:
        assert bounds == stated
    else:
        # Bit-exact, no tensor of its own, or the host's own spread, which the stream check measures.
        assert re.search(r"bit-e|no tensor|spread", parity)


def test_items_beside_and_phases_exist() -> None:
    keys = {patch.key for patch in PATCHES}
    for check in CHECKS.values():
        assert set(check.beside) <= keys
        assert set(check.phases) <= set(PHASES)


def test_block_of_switches_every_other_item_off() -> None:
    settings = parse_block(block_of("s3_graph"))
    assert [key for key, options in settings.items() if options.enabled] == ["s3_graph"]
