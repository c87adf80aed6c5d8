# SPDX-License-Identifier: Apache-2.0
"""How each item is held against stock: one row per item of the patch table.

A row says what the item is compared by. Items that act on one thing share its
check: prompt features, the talker's stop censoring, decoded streams, the deploy
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping

from omni_speech_accel.measure.check import Check
from omni_speech_accel.measure.deploy_check import check_full_graph
from omni_speech_accel.measure.prompt_check import check_prompt_features
from omni_speech_accel.measure.stream_check import check_streams
from omni_speech_accel.measure.talker_check import check_stop_censoring

FEATURES = ("prompt_features", "first_chunk")

CHECKS: Mapping[str, Check] = {
    "stop_index_cache": Check(check_stop_censoring, acted=("hits",)),
    "sync_free_prompt": Check(check_prompt_features, phases=FEATURES, acted=("calls",)),
    "speaker_device": Check(check_prompt_features, phases=FEATURES),
    "speaker_graph": Check(check_prompt_features, beside=("speaker_device",), phases=FEATURES, acted=("replays",)),
    "speaker_stream": Check(check_prompt_features, beside=("speaker_device",), phases=FEATURES, acted=("calls",)),
    "s3_graph": Check(check_prompt_features, phases=FEATURES, acted=("replays",)),
    "fish_omni_full_graph": Check(check_full_graph),
    "cold_reference_batch": Check(check_streams, phases=("first_chunk",)),
    "cold_setup_precapture": Check(check_streams, beside=("cold_reference_batch",), phases=("first_chunk",)),
    "cross_reference_decode": Check(check_streams, phases=("first_chunk", "steady_chunk")),
}
