# SPDX-License-Identifier: Apache-2.0
"""The talker's stop censoring over the states that a stream goes through, item on against stock."""

from __future__ import annotations

from types import SimpleNamespace

from omni_speech_accel.measure.check import Check, block_of
from omni_speech_accel.measure.compare import Difference, compare
from omni_speech_accel.measure.workbench import Outcome, Workbench, acted, refusal
from omni_speech_accel.plugin.table import patch_for

VOCABULARY = 6562
# Codec EOS alone, with one extra stop id, and with several.
STOP_SETS = ((6561,), (6561, 1), (6561, 1, 17, 4096))
STEPS = (0, 49, 50, 51)
MIN_TOKENS = 50


def check_stop_censoring(bench: Workbench, item: str, check: Check) -> Outcome:
    """Compare the censored logits before, at and after ``min_tokens``, masked by the turn's end and not, twice each."""
    import torch
    from vllm_omni.model_executor.models.minicpmo_4_5 import talker_codec_sample

    from omni_speech_accel.measure.driver import talker_session
    from omni_speech_accel.plugin.session import use_session

    session = talker_session(bench.model, block_of(*check.beside, item))
    generator = torch.Generator().manual_seed(0)
    floor = torch.tensor([MIN_TOKENS], dtype=torch.int32, device=bench.platform)
    differences: list[Difference] = []
    for _ in range(2):
        for stop_ids in STOP_SETS:
            for step in STEPS:
                for masked in (False, True):
                    logits = torch.randn(1, VOCABULARY, generator=generator).to(bench.platform)
                    state = SimpleNamespace(step=torch.tensor([step], dtype=torch.int32, device=bench.platform))
                    with torch.inference_mode():
                        results = []
                        for active in (None, session):
                            with use_session(active):
                                results.append(
                                    talker_codec_sample._censor_stop_logits(
                                        logits, state, floor, stop_ids=stop_ids, eos_window_masked=masked
                                    )
                                )
                    name = f"step {step}, {len(stop_ids)} stop ids{', turn end' if masked else ''}: logits"
                    differences.append(
                        compare(name, results[0], results[1], patch_for(item).tolerance("logits", bench.platform))
                    )
    refused, native = refusal(session, item)
    counters = session.snapshot().get(item, {})
    return Outcome(tuple(differences), refused, native, acted(counters, check.acted), counters=counters)
