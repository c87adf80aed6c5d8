# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from importlib.metadata import distributions, entry_points

import pytest

HEAVY = ("torch", "vllm", "vllm_omni", "pydantic", "onnx", "numpy")


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def test_importing_and_registering_imports_nothing_heavy() -> None:
    done = run(
        f"""
        import sys
        import omni_speech_accel.plugin as plugin
        plugin.register()
        assert plugin.is_registered()
        print([name for name in {HEAVY!r} if name in sys.modules])
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_entry_point_costs_under_50_ms_in_a_vllm_process() -> None:
    # vLLM has loaded asyncio and importlib.metadata long before it loads plugins; the best of five is the cost
    # without the machine's noise.
    code = """
        import asyncio, importlib.metadata, time
        start = time.perf_counter()
        from omni_speech_accel.plugin import register
        register()
        print(time.perf_counter() - start)
        """
    assert min(float(run(code).stdout) for _ in range(5)) < 0.05


def test_register_is_idempotent_across_threads() -> None:
    done = run(
        """
        import threading
        from omni_speech_accel import plugin
        from omni_speech_accel.plugin import binding
        calls = []
        original = binding.install
        binding.install = lambda: calls.append(1) or original()
        threads = [threading.Thread(target=plugin.register) for _ in range(16)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(len(calls))
        """
    )
    assert done.stdout.strip() == "1", done.stderr


def test_a_failing_import_never_raises_out_of_the_entry_point() -> None:
    done = run(
        """
        import sys
        sys.modules["wrapt"] = None
        from omni_speech_accel import plugin
        plugin.register()
        print(plugin.is_registered())
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
    assert "the server runs stock" in done.stderr


@pytest.mark.parametrize("value", ["0", "false", "False", "off", "no", " 0 "])
def test_the_kill_switch_in_any_spelling_installs_nothing(value: str) -> None:
    done = run(
        """
        import sys
        from omni_speech_accel import plugin
        plugin.register()
        print(plugin.is_registered(), "omni_speech_accel.plugin.binding" in sys.modules)
        """,
        OMNI_SPEECH_ACCEL=value,
    )
    assert done.stdout.strip() == "False False", done.stderr


@pytest.mark.parametrize("value", ["1", "true", ""])
def test_other_values_of_the_switch_change_nothing(value: str) -> None:
    done = run(
        "from omni_speech_accel import plugin; plugin.register(); print(plugin.is_registered())",
        OMNI_SPEECH_ACCEL=value,
    )
    assert done.stdout.strip() == "True", done.stderr


def test_the_metadata_declares_the_entry_point() -> None:
    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "omni_speech_accel"]
    if not found:
        from configparser import ConfigParser
        from pathlib import Path

        parser = ConfigParser()
        parser.read(Path(__file__).parents[2] / "setup.cfg")
        assert (
            "omni_speech_accel = omni_speech_accel.plugin:register"
            in parser["options.entry_points"]["vllm.general_plugins"]
        )
        return
    assert found[0].value == "omni_speech_accel.plugin:register"
    assert callable(found[0].load())


def test_threads_that_register_and_unregister_leave_a_clean_state() -> None:
    from omni_speech_accel import plugin

    def flip() -> None:
        for _ in range(50):
            plugin.register()
            plugin.unregister()

    threads = [threading.Thread(target=flip) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not plugin.is_registered()


def test_the_log_names_what_a_filter_of_ours_alone_leaves_out_once_in_a_server() -> None:
    code = """
        import logging, multiprocessing, sys
        logging.basicConfig(stream=sys.stdout)
        from omni_speech_accel import plugin
        plugin.register()
        plugin.register()
        child = multiprocessing.get_context("fork").Process(target=lambda: (plugin.unregister(), plugin.register()))
        child.start(); child.join()
        """
    lines = run(code, VLLM_PLUGINS="omni_speech_accel").stdout.splitlines()
    (line,) = [line for line in lines if "VLLM_PLUGINS=omni_speech_accel filters" in line]
    assert line.startswith("WARNING:vllm.omni_speech_accel:")
    named = set(line.split("drops ")[1].split("; ")[0].split(", "))
    points = [point for distribution in distributions() for point in distribution.entry_points]
    others = {point.name for point in points if point.group.startswith("vllm")} - {"omni_speech_accel"}
    assert others
    assert named == others
    recommended = line.rsplit("VLLM_PLUGINS=", 1)[1]
    assert "filters" not in run(code, VLLM_PLUGINS=recommended).stdout
