# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the whole suite. Tests run on the real host that is installed in this environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("OMNI_SPEECH_ACCEL", None)

from omni_speech_accel import plugin
from tests.fixtures_checkpoint import small_checkpoint  # noqa: F401
from tests.fixtures_trained import trained  # noqa: F401

# Modules of half a minute of CPU and more, longest first.
LONG = ("test_mutations", "test_bench", "test_compare_modes", "test_verify", "test_sync_free_prompt", "test_end_to_end")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long modules first: whoever of two processes takes one of them last works on when the other has nothing left."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture
def registered() -> Iterator[None]:
    """The plugin registered for one test, and taken off after it."""
    plugin.register()
    assert plugin.is_registered()
    yield
    plugin.unregister()


@pytest.fixture
def accel_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the package logs. vLLM, once imported, keeps its loggers' records from the root that caplog listens at."""
    logger = logging.getLogger("vllm.omni_speech_accel")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture
def stage_config() -> Callable[..., SimpleNamespace]:
    """Builds what a stage model reads of a ``VllmConfig``: the model path and the places of the YAML block."""

    def build(
        model: object = "unused", *, extra: dict[str, Any] | None = None, additional: dict[str, Any] | None = None
    ) -> SimpleNamespace:
        return SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(model), stage_connector_config={"extra": dict(extra or {})}, model_stage=None
            ),
            additional_config=dict(additional or {}),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            load_config=SimpleNamespace(load_format="auto"),
        )

    return build


@pytest.fixture
def seen_as(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the host believe that it runs on another platform."""
    import vllm_omni.platforms as platforms

    real = platforms.current_omni_platform

    def choose(name: str) -> None:
        class Seen:
            device_name = name
            device_type = name

            def __getattr__(self, attribute: str) -> Any:
                return getattr(real, attribute)

        monkeypatch.setitem(vars(platforms), "current_omni_platform", Seen())

    return choose


@pytest.fixture
def npu(seen_as: Any) -> None:
    seen_as("npu")
