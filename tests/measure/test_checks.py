# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest

from omni_speech_accel.measure.abba import PHASES
from omni_speech_accel.measure.check import block_of
from omni_speech_accel.measure.checks import CHECKS
from omni_speech_accel.plugin.settings import parse_block
from omni_speech_accel.plugin.table import PATCHES, SPEAKER_EMBEDDING, Patch, patch_for
from omni_speech_accel.tolerance import EXACT


def test_every_item_of_the_table_has_a_check() -> None:
    assert set(CHECKS) == {patch.key for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.key)
def test_a_row_without_a_tolerance_says_why_it_needs_none(patch: Patch) -> None:
    if patch.tolerances:
        assert all(str(allowed) in patch.against_stock for allowed in patch.tolerances.values())
    else:
        # Bit-exact, no tensor of its own, or the host's own spread, which the stream check measures.
        assert re.search(r"bit-e|no tensor|spread", patch.parity)


def test_what_a_row_does_not_name_must_be_bit_exact() -> None:
    row = patch_for("speaker_device")
    assert row.tolerance("speech tokens", "cuda") == EXACT
    assert row.tolerance(SPEAKER_EMBEDDING, "cpu") == row.tolerances[SPEAKER_EMBEDDING].full
    assert row.tolerance(SPEAKER_EMBEDDING, "npu") == row.tolerances[SPEAKER_EMBEDDING].npu


def test_items_beside_and_phases_exist() -> None:
    keys = {patch.key for patch in PATCHES}
    for check in CHECKS.values():
        assert set(check.beside) <= keys
        assert set(check.phases) <= set(PHASES)


def test_block_of_switches_every_other_item_off() -> None:
    settings = parse_block(block_of("s3_graph"))
    assert [key for key, options in settings.items() if options.enabled] == ["s3_graph"]
