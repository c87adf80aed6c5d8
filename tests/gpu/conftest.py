# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need a real accelerator, and the one place that says why they do not run here.

A test marked ``gpu`` or ``npu`` (or both) runs where one of its devices is what the host runs on. Elsewhere it is
skipped, unless ``OMNI_SPEECH_ACCEL_TEST_DEVICE`` names the device that must be here: ``run.sh`` sets it, so that a
machine whose driver is out of order fails instead of passing by skipping everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_speech_accel import plugin
from omni_speech_accel.measure.driver import Code2WavDriver, ready_platform
from tests.gpu import harness

REQUIRED_DEVICE = "OMNI_SPEECH_ACCEL_TEST_DEVICE"
MARKED_DEVICES = {"gpu": "cuda", "npu": "npu"}

Code2WavFactory = Callable[..., Code2WavDriver]


def _devices_here() -> set[str]:
    """Device types that PyTorch can use. Asked of PyTorch, not of the host: the host takes 10 s to import."""
    npu = getattr(torch, "npu", None)
    return {
        name for name, module in (("cuda", torch.cuda), ("npu", npu)) if module is not None and module.is_available()
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = _devices_here()
    required = os.environ.get(REQUIRED_DEVICE)
    if required and required not in here:
        raise pytest.UsageError(f"{REQUIRED_DEVICE}={required}, and PyTorch {torch.__version__} sees no such device")
    # That the host is the real one and speaks is asked of a fresh process, before a test has built a stage.
    items.sort(key=lambda item: item.path.name != "test_host_import.py")
    for item in items:
        wanted = {device for mark, device in MARKED_DEVICES.items() if item.get_closest_marker(mark) is not None}
        if wanted and not wanted & here:
            item.add_marker(pytest.mark.skip(reason=f"needs {' or '.join(sorted(wanted))}"))


@pytest.fixture(scope="session")
def platform() -> Iterator[str]:
    """The device type that the host runs on, ``cuda`` or ``npu``, with the plugin registered before its import."""
    required = os.environ.get(REQUIRED_DEVICE) or "auto"
    yield ready_platform(required)
    plugin.unregister()


@pytest.fixture(scope="session")
def device(platform: str) -> torch.device:
    """The first card."""
    return torch.device(platform, 0) if platform != "cpu" else torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def anchored_graph_pool(request: pytest.FixtureRequest) -> Iterator[None]:
    """A graph that lives in the host's pool for the whole run.

    A stage that is closed frees its graphs; were they the pool's last, the next capture of any stage in this process
    would fail with ``use_count > 0 INTERNAL ASSERT FAILED``. A server does not close its one stage and go on.
    """
    anchor: Any = None
    if "cuda" in _devices_here() and request.session.items and request.getfixturevalue("platform") == "cuda":
        from vllm.platforms import current_platform

        anchor = torch.cuda.CUDAGraph()
        with torch.cuda.graph(anchor, pool=current_platform.get_global_graph_pool()):
            torch.zeros(1, device="cuda")
    yield
    del anchor


@pytest.fixture(scope="session")
def checkpoint_dir() -> Path:
    """A full-size, seed 0 model directory. Shared between tests and processes: copy it before changing it."""
    return harness.checkpoint()


@pytest.fixture
def code2wav_factory(platform: str, checkpoint_dir: Path) -> Iterator[Code2WavFactory]:
    """Builds loaded stages as the host ships them for this device; a test's stages are dropped when it ends.

    ``build(block=None, extra=None, additional_config=None, seed=0)``: ``block`` is the ``omni_speech_accel`` block
    (``None``: stock), ``extra`` and ``additional_config`` change the shipped deploy settings.
    """
    built: list[Code2WavDriver] = []

    def build(
        block: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        additional_config: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Code2WavDriver:
        profile = harness.profile_with(platform, extra, additional_config)
        driver = Code2WavDriver(checkpoint_dir, profile, block=block, seed=seed)
        built.append(driver)
        return driver

    yield build
    while built:
        built.pop().close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
