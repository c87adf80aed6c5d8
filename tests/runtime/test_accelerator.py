# SPDX-License-Identifier: Apache-2.0
"""The registry of backends, and the host backend."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

from omni_speech_accel import runtime
from omni_speech_accel.runtime import GraphCache, RuntimeSetupError, accelerator_for
from omni_speech_accel.runtime.cpu import HostAccelerator

PACKAGE = Path(runtime.__file__).resolve().parents[1]


class Other(HostAccelerator):
    device_type = "other"


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_host_backend_answers_for_the_host(device: str | torch.device) -> None:
    accelerator = accelerator_for(device)
    assert isinstance(accelerator, HostAccelerator)
    assert not accelerator.supports_streams
    assert not accelerator.supports_graphs
    assert accelerator.resolve(device) == torch.device("cpu")


def test_one_backend_instance_per_device_type() -> None:
    assert accelerator_for("cpu") is accelerator_for(torch.device("cpu"))


def test_unknown_device_type_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'abacus'.*cpu, cuda, npu"):
        accelerator_for("abacus:0")


def test_registered_backend_answers_until_it_is_unregistered() -> None:
    runtime.register_backend("other", Other)
    try:
        assert isinstance(accelerator_for("other:1"), Other)
    finally:
        runtime.unregister_backend("other")
    with pytest.raises(ValueError, match="other"):
        accelerator_for("other")
    runtime.unregister_backend("other")


def test_built_in_backend_comes_back_when_its_replacement_goes() -> None:
    first = accelerator_for("cpu")
    runtime.register_backend("cpu", Other)
    try:
        assert isinstance(accelerator_for("cpu"), Other)
    finally:
        runtime.unregister_backend("cpu")
    assert type(accelerator_for("cpu")) is type(first)


def test_threads_that_ask_together_get_one_instance() -> None:
    made: list[Other] = []
    barrier = threading.Barrier(8)

    def factory() -> Other:
        made.append(Other())
        return made[-1]

    runtime.register_backend("other", factory)
    try:
        answers: list[object] = []

        def ask() -> None:
            barrier.wait(10)
            answers.append(accelerator_for("other"))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    finally:
        runtime.unregister_backend("other")
    assert len(made) == 1
    assert answers == made * 8


def test_host_records_no_graph() -> None:
    accelerator = accelerator_for("cpu")
    with pytest.raises(RuntimeSetupError, match="cpu"):
        accelerator.capture(lambda: None, "cpu")
    with pytest.raises(RuntimeSetupError, match="cpu"):
        accelerator.prepare_capture("cpu")


def test_graph_cache_on_the_host_calls_the_function() -> None:
    cache = GraphCache("speaker", accelerator_for("cpu"), "cpu", max_graphs=4)
    mel = torch.ones(3)
    assert cache.run(3, lambda value: value, mel) is mel
    assert cache.counters.snapshot()["eager"] == 1  # type: ignore[attr-defined]
    assert cache.graphs == 0


def test_host_pins_by_copying() -> None:
    mine = torch.ones(3)
    pinned = accelerator_for("cpu").pin_memory(mine)
    mine.zero_()
    assert torch.equal(pinned, torch.ones(3))


def test_no_module_outside_the_runtime_names_a_device_library() -> None:
    """`torch.cuda.x` or `torch.npu.x` elsewhere in the package is code that one of the two devices will never run."""
    found = []
    for source in PACKAGE.rglob("*.py"):
        if source.parent == PACKAGE / "runtime":
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
            if named and node.attr in ("cuda", "npu"):  # type: ignore[attr-defined]
                found.append(f"{source.relative_to(PACKAGE)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found
