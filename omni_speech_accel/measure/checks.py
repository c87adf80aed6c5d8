# SPDX-License-Identifier: Apache-2.0
"""How each item is held against stock: one row per item of the patch table.

A row says what the item is compared by and how far it may differ. Items that act
on one thing share its check: prompt features, the talker's stop censoring,
decoded streams, the deploy configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omni_speech_accel.measure.check import Check

if TYPE_CHECKING:
    from omni_speech_accel.measure.driver import Code2WavDriver
    from omni_speech_accel.measure.workbench import Outcome, Workbench

__all__ = [
    "CHECKS",
]


def _prompt(bench: Workbench, item: str) -> Outcome:
    from omni_speech_accel.measure.prompt_check import check_prompt_features

    return check_prompt_features(bench, item, CHECKS[item])


def _stop(bench: Workbench, item: str) -> Outcome:
    from omni_speech_accel.measure.talker_check import check_stop_censoring

    return check_stop_censoring(bench, item, CHECKS[item])


def _streams(bench: Workbench, item: str) -> Outcome:
    from omni_speech_accel.measure.stream_check import check_streams

    return check_streams(bench, item, CHECKS[item])


def _deploy(bench: Workbench, item: str) -> Outcome:
    from omni_speech_accel.measure.deploy_check import check_full_graph

    return check_full_graph(bench, item, CHECKS[item])


def _cold_policy(driver: Code2WavDriver) -> str:
    from omni_speech_accel.items.cold_reference_batch import policy_problem

    return policy_problem(driver.backend)


FEATURES = ("prompt_features", "first_chunk")

CHECKS: Mapping[str, Check] = {
    "stop_index_cache": Check(_stop, acted=("hits",)),
    "sync_free_prompt": Check(_prompt, phases=FEATURES, acted=("calls",)),
    "speaker_device": Check(_prompt, phases=FEATURES),
    "speaker_graph": Check(_prompt, beside=("speaker_device",), phases=FEATURES, acted=("replays",)),
    "speaker_stream": Check(_prompt, beside=("speaker_device",), phases=FEATURES, acted=("calls",)),
    "s3_graph": Check(_prompt, phases=FEATURES, acted=("replays",)),
    "fish_omni_full_graph": Check(_deploy),
    "cold_reference_batch": Check(_streams, phases=("first_chunk",), idle=_cold_policy),
    "cold_setup_precapture": Check(_streams, beside=("cold_reference_batch",), phases=("first_chunk",)),
    "cross_reference_decode": Check(_streams, phases=("first_chunk", "steady_chunk")),
}
