# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from omni_speech_accel.plugin.session import StageSession, settings_from_vllm_config
from omni_speech_accel.plugin.settings import Settings, SettingsError, resolve


def session(block: Any = None, **unfit: str) -> StageSession:
    return StageSession(resolve(*([] if block is None else [("t", block)])), "code2wav", unfit)


def config(extra: Any = None, additional: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            stage_connector_config={"name": "c", "extra": extra} if extra is not None else None
        ),
        additional_config=additional,
    )


def test_both_places_of_the_yaml_reach_the_stage() -> None:
    for vllm_config in (config(extra={"omni_speech_accel": {}}), config(additional={"omni_speech_accel": {}})):
        settings = settings_from_vllm_config(vllm_config)
        assert settings.present
        assert settings.enabled("sync_free_prompt")


def test_additional_config_overrides_the_connector() -> None:
    settings = settings_from_vllm_config(
        config(
            extra={"omni_speech_accel": {"s3_graph": False, "speaker_graph": False}},
            additional={"omni_speech_accel": {"s3_graph": True}},
        )
    )
    assert settings.enabled("s3_graph")
    assert not settings.enabled("speaker_graph")


@pytest.mark.parametrize("vllm_config", [config(), config({}, {}), SimpleNamespace(), None])
def test_no_block_anywhere_is_stock(vllm_config: Any) -> None:
    assert settings_from_vllm_config(vllm_config) == Settings()


def test_a_wrong_block_names_its_place() -> None:
    with pytest.raises(SettingsError, match=r"stages\[\]\.additional_config\.omni_speech_accel\.spaker_graph"):
        settings_from_vllm_config(config(additional={"omni_speech_accel": {"spaker_graph": True}}))
    with pytest.raises(SettingsError, match=r"connectors\.\*\.extra\.omni_speech_accel"):
        settings_from_vllm_config(config(extra={"omni_speech_accel": "mabye"}))


def test_the_start_up_line_names_what_is_on_off_and_not_applied_and_why() -> None:
    line = session({"speaker_graph": False}, speaker_stream="for cuda and npu, not cpu").describe()
    assert ": stage code2wav on vllm-omni " in line
    on = line.partition("on: stop_index_cache")[2].partition(";")[0]
    assert "sync_free_prompt" in on
    assert "speaker_graph" not in on
    assert "; off: speaker_graph;" in line
    assert line.endswith("not applied: speaker_stream (for cuda and npu, not cpu)")


def test_a_stage_without_a_block_says_so() -> None:
    assert session().describe().endswith("no omni_speech_accel block, stock")


def test_the_start_up_line_is_logged_once(accel_log: pytest.LogCaptureFixture) -> None:
    stage = session({})
    stage.announce()
    stage.announce()
    assert len(accel_log.records) == 1


def test_a_rejected_item_is_off_for_good_and_logged_once(accel_log: pytest.LogCaptureFixture) -> None:
    stage = session({})
    stage.announce()
    assert stage.on("speaker_device")
    stage.reject("speaker_device", "parity")
    stage.reject("speaker_device", "again")
    assert not stage.on("speaker_device")
    assert stage.not_applied == {"speaker_device": "parity"}
    assert [record.getMessage() for record in accel_log.records if record.levelname == "WARNING"] == [
        "omni_speech_accel: stage code2wav: speaker_device not applied: parity"
    ]


def test_a_rejection_before_the_line_is_part_of_the_line(accel_log: pytest.LogCaptureFixture) -> None:
    stage = session({})
    stage.reject("speaker_device", "parity")
    assert not accel_log.records
    assert "not applied: speaker_device (parity)" in stage.describe()


def test_an_item_that_was_turned_off_is_never_reported_as_not_applied() -> None:
    assert session({"speaker_stream": False}, speaker_stream="x").not_applied == {}


def test_state_is_made_once_across_threads() -> None:
    stage = session({})
    made: list[object] = []
    barrier = threading.Barrier(8)

    def make() -> object:
        made.append(object())
        return made[-1]

    def work() -> None:
        barrier.wait()
        stage.state("s3_graph", make)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_counters_are_kept_per_item_and_exported() -> None:
    from prometheus_client import REGISTRY

    stage = StageSession(resolve(("t", {})), "stage-for-metrics")
    stage.counters("s3_graph").inc("replays", 3)
    stage.counters("s3_graph").observe("replays", 0.004)
    assert stage.snapshot() == {"s3_graph": {"replays": 3, "replays_seconds": 0.004}}
    labels = {"stage": "stage-for-metrics", "item": "s3_graph", "event": "replays"}
    assert REGISTRY.get_sample_value("omni_speech_accel_events_total", labels) == 3
    assert REGISTRY.get_sample_value("omni_speech_accel_seconds_count", labels) == 1
