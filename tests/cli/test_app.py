# SPDX-License-Identifier: Apache-2.0
"""The command line: what it imports, what it prints where, and its exit codes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from omni_speech_accel import __version__
from omni_speech_accel.cli import measure as command
from omni_speech_accel.cli.app import app
from omni_speech_accel.deploy.blocks import find_blocks
from omni_speech_accel.errors import RunError
from omni_speech_accel.host import source as host
from omni_speech_accel.measure.compare import Difference
from omni_speech_accel.measure.verify import ItemResult, VerifyReport
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.settings import parse_block
from omni_speech_accel.plugin.table import PATCHES

COMMANDS = ("status", "verify", "bench", "ab", "config", "transitions", "compare-modes")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def shell(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The command as a process, so that what the host prints while it is imported counts."""
    return subprocess.run(
        [sys.executable, "-m", "omni_speech_accel", *arguments], capture_output=True, text=True, timeout=timeout
    )


def test_version() -> None:
    assert invoke("--version").output.strip() == __version__


@pytest.mark.parametrize("arguments", [("--version",), ("status", "--json"), ("nonsense",)])
def test_python_m_works_as_the_command_does(arguments: Sequence[str]) -> None:
    command = (
        "import sys; sys.argv[0] = 'omni-speech-accel'; from omni_speech_accel.cli.app import main; sys.exit(main())"
    )
    script = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, timeout=60)
    module = shell(*arguments)
    assert (module.returncode, module.stdout) == (script.returncode, script.stdout)
    assert module.stdout or module.stderr


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time\n"
        "from omni_speech_accel.cli.app import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'vllm', 'vllm_omni', 'numpy', 'httpx', 'onnx', 'matplotlib', 'soundfile'}\n"
        "print('HEAVY', sorted({name.split('.')[0] for name in sys.modules} & heavy), time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for name in COMMANDS:
        assert name in done.stdout
    line = done.stdout.splitlines()[-1]
    assert line.startswith("HEAVY []")
    assert float(line.split()[-1]) < 1.0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_an_example_and_its_exit_codes(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert f"omni-speech-accel {name}" in text
    assert "Exit code: 0" in text
    assert "130 interrupted" in text.replace("│ ", "")
    assert "--json" in text


# ---- status


def test_status_prints_one_json_document_and_nothing_else() -> None:
    done = shell("status", "--json", "--platform", "cuda")
    found = json.loads(done.stdout)
    assert [item["key"] for item in found["items"]] == [patch.key for patch in PATCHES]
    assert done.returncode == found["exit_code"]


def test_status_is_a_table_for_people() -> None:
    result = invoke("status", "--platform", "cuda")
    for patch in PATCHES:
        assert patch.key in result.output
    assert "VLLM_PLUGINS" in result.output


def wrong_deploy(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_text("connectors: {c: {extra: {omni_speech_accel: {s3_grap: true}}}}\n")
    return str(path)


def test_a_wrong_deploy_is_exit_code_two_with_the_nearest_name(tmp_path: Path) -> None:
    result = invoke("status", "--deploy-config", wrong_deploy(tmp_path))
    assert result.exit_code == 2
    assert 'did you mean "s3_graph"' in result.stderr
    assert result.stdout == ""


def test_with_json_an_error_is_a_document_too(tmp_path: Path) -> None:
    result = invoke("status", "--json", "--deploy-config", wrong_deploy(tmp_path))
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["exit_code"] == 2
    assert "s3_grap" in found["error"]


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe\x00", "no valid YAML"), (b"base_config: my.yaml", "circle")]
)
def test_a_deploy_that_cannot_be_read_is_exit_code_two(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(content)
    result = invoke("status", "--deploy-config", str(path), "--json")
    assert result.exit_code == 2
    assert words in json.loads(result.stdout)["error"]


def test_a_missing_deploy_is_exit_code_two() -> None:
    result = invoke("status", "--deploy-config", "no/such/file.yaml")
    assert result.exit_code == 2
    assert "no/such/file.yaml" in result.stderr


# ---- config


def overlay(*arguments: str) -> dict[str, Any]:
    result = invoke("config", *arguments)
    assert result.exit_code == 0, result.stderr
    loaded: dict[str, Any] = yaml.safe_load(result.stdout)
    return loaded


def block_of(content: dict[str, Any]) -> dict[str, Any]:
    (block,) = find_blocks(content)
    assert block.problem == ""
    parse_block(block.value)
    value: dict[str, Any] = block.value
    return value


def stock_deploy(name: str) -> Path:
    """A deploy file of the installed host."""
    location = host.host_info().location
    assert location is not None
    return location / "deploy" / name


def test_config_prints_an_overlay_with_every_item_of_the_model() -> None:
    content = overlay("minicpmo_4_5.yaml", "--platform", "cuda")
    location = host.host_info().location
    assert location is not None
    assert content["base_config"] == str(location / "deploy" / "minicpmo_4_5.yaml")
    block = block_of(content)
    items = {
        patch.key: fit(patch).applies for patch in PATCHES if "MiniCPM-o" in patch.where and "cuda" in patch.platforms
    }
    assert block == items
    assert any(items.values())


def test_config_takes_items_off_and_options() -> None:
    block = block_of(
        overlay(
            "minicpmo_4_5.yaml", "--platform", "npu", "--off", "s3_graph,speaker_stream", "--on", "speaker_graph",
            "--option", "speaker_graph.max_graphs=4", "--option", "cold_reference_batch.max_batch=2",
        )
    )  # fmt: skip
    assert (block["s3_graph"], block["speaker_stream"]) == (False, False)
    assert block["speaker_graph"] == {"max_graphs": 4}
    assert block["cold_reference_batch"] == {"max_batch": 2}


def test_config_places_the_block_where_it_is_asked() -> None:
    content = overlay("minicpmo_4_5.yaml", "--platform", "cuda", "--place", "additional_config")
    assert "connectors" not in content
    (stage,) = content["stages"]
    assert stage["stage_id"] == 2
    assert "s3_graph" in stage["additional_config"]["omni_speech_accel"]


def test_config_of_a_deploy_without_connectors_uses_its_stage() -> None:
    content = overlay("step_audio_2.yaml", "--platform", "cuda")
    assert content["stages"][0]["stage_id"] == 1
    result = invoke("config", "step_audio_2.yaml", "--place", "connectors")
    assert result.exit_code == 2
    assert "has no connectors" in result.stderr


def test_config_of_a_users_own_base_needs_a_profile_and_keeps_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(stock_deploy("minicpmo_4_5.yaml"), tmp_path / "mine.yaml")
    result = invoke("config", "mine.yaml")
    assert result.exit_code == 2
    assert "--profile" in result.stderr
    assert overlay("mine.yaml", "--profile", "minicpmo_4_5_npu")["base_config"] == "mine.yaml"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--on", "s3_grap"), 'did you mean "s3_graph"'),
        (("--on", "s3_graph", "--off", "s3_graph"), "named by --on and by --off"),
        (("--option", "s3_graph=4"), "ITEM.KEY=VALUE"),
        (("--option", "s3_graph.max_graph=4"), 'did you mean "max_graphs"'),
        (("--option", "s3_graph.max_graphs=-1"), "max_graphs"),
        (("--off", "s3_graph", "--option", "s3_graph.max_graphs=4"), "would do nothing"),
        (("--profile", "nope"), "no model is known by nope"),
        (("--option", "s3_graph.max_graphs=[1"), "no valid YAML"),
    ],
)
def test_config_refuses_what_would_not_start(arguments: Sequence[str], words: str) -> None:
    result = invoke("config", "minicpmo_4_5.yaml", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_config_json_holds_the_same_overlay() -> None:
    found = json.loads(invoke("config", "minicpmo_4_5.yaml", "--platform", "cuda", "--json").stdout)
    assert found["profile"] == "minicpmo_4_5_cuda"
    assert yaml.safe_load(found["text"]) == found["overlay"]


# ---- verify, bench and ab


def report(*results: ItemResult) -> VerifyReport:
    return VerifyReport("1", "host", "cpu", "model", "profile", results, 1.0)


DIFFERENT = Difference("speaker embedding", False, 0.5, 0.1, 0.9, 3, 192, "relative <= 2e-05")
PASSED = ItemResult("sync_free_prompt", "passed", "", "bit-exact", False)
BROKEN = ItemResult("speaker_device", "failed", "1 of 5 comparisons differ", "", False, worst=DIFFERENT)


def test_config_for_a_cpu_leaves_off_what_a_cpu_cannot_have() -> None:
    block = block_of(overlay("minicpmo_4_5.yaml", "--platform", "cpu", "--on", "s3_graph"))
    off = {
        patch.key for patch in PATCHES if patch.key in block and not ("cpu" in patch.platforms and fit(patch).applies)
    } - {"s3_graph"}
    assert off
    assert {key for key, value in block.items() if value is False} == off


def test_an_interrupt_before_there_is_a_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(console: object, **options: Any) -> VerifyReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_verify", interrupted)
    shown = invoke("verify", "--json")
    assert shown.exit_code == 130
    assert json.loads(shown.stdout)["error"].startswith("interrupted")


def test_config_of_a_base_that_is_not_there_is_an_error() -> None:
    for base in ("/nonexistent/minicpmo_4_5.yaml", "minicpmo_4_5 of mine.yaml"):
        result = invoke("config", base)
        assert result.exit_code == 2
        assert "does not exist" in result.stderr


@pytest.mark.parametrize(("results", "code"), [((PASSED,), 0), ((PASSED, BROKEN), 1)])
def test_verify_exit_code_and_name_of_the_failed_item(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, results: tuple[ItemResult, ...], code: int
) -> None:
    monkeypatch.setattr(command, "run_verify", lambda console, **options: report(*results))
    shown = invoke("verify", "--out", str(tmp_path))
    assert shown.exit_code == code
    assert ("failed: speaker_device" in shown.output) is (code == 1)
    found = json.loads(invoke("verify", "--json").stdout)
    assert found["failed"] == (["speaker_device"] if code else [])
    assert json.loads((tmp_path / "verify.json").read_text())["results"][0]["differences"] == []


def test_results_of_an_earlier_run_are_kept_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "run_verify", lambda console, **options: report(PASSED))
    assert invoke("verify", "--out", str(tmp_path)).exit_code == 0
    (tmp_path / "verify.json").write_text("earlier")
    (tmp_path / "bench.json").write_text("earlier")
    for arguments in (("verify",), ("bench",), ("ab", "--a", "stock", "--b", "true")):
        refused = invoke(*arguments, "--out", str(tmp_path))
        assert refused.exit_code == 2
        assert "json of an earlier run: give another folder, or --overwrite" in refused.stderr
    assert (tmp_path / "verify.json").read_text() == (tmp_path / "bench.json").read_text() == "earlier"
    assert invoke("verify", "--out", str(tmp_path), "--overwrite").exit_code == 0
    assert json.loads((tmp_path / "verify.json").read_text())["ok"]


def test_sigterm_ends_a_run_as_an_interrupt_does_and_is_the_callers_own_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run_verify(console: object, **options: Any) -> VerifyReport:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        return report(PASSED, BROKEN)

    monkeypatch.setattr(command, "run_verify", run_verify)
    assert invoke("verify").exit_code == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_verify_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run_verify(console: object, **options: Any) -> VerifyReport:
        seen.update(options)
        return report(PASSED)

    monkeypatch.setattr(command, "run_verify", run_verify)
    invoke(
        "verify", "--model", str(tmp_path), "--items", "s3_graph, speaker_graph", "--device", "cuda", "--size", "full",
        "--quick", "--extra", "token2wav_n_timesteps=10", "--extra", "enable_cfm_graph=false",
    )  # fmt: skip
    assert seen == {
        "model": tmp_path,
        "items": ["s3_graph", "speaker_graph"],
        "device": "cuda",
        "size": "full",
        "quick": True,
        "extra": {"token2wav_n_timesteps": 10, "enable_cfm_graph": False},
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("verify", "--items", "speaker_devise"), "did you mean speaker_device"),
        (("verify", "--extra", "no-equals-sign"), "--extra takes KEY=VALUE"),
        (("verify", "--extra", "a=[1"), "--extra a: no valid YAML"),
        (("verify", "--out", "/proc/nope"), "/proc/nope"),
        (("verify", "--out", __file__), __file__),
        (("bench", "--out", "/proc/nope"), "/proc/nope"),
        (("bench", "--items", "speaker_devise"), "did you mean speaker_device"),
        (("ab", "--a", "stock", "--b", "{s3_grap: true}"), 'did you mean "s3_graph"'),
        (("ab", "--a", "@/no/such/file", "--b", "true"), "/no/such/file"),
        (("ab", "--a", "{", "--b", "true"), "--a"),
    ],
)
def test_wrong_arguments_are_exit_code_two_before_any_work(arguments: Sequence[str], words: str) -> None:
    started = time.process_time()
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert time.process_time() - started < 5.0


def test_verify_as_a_process_prints_json_alone_and_leaves_nothing_behind(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    """The host logs to stdout and its imports print; none of it may reach a script that reads the document."""
    done = subprocess.run(
        [sys.executable, "-m", "omni_speech_accel", "verify", "--json", "--items", "s3_graph", "--model",
         str(small_checkpoint)],
        capture_output=True, text=True, timeout=300, env={**__import__("os").environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    found = json.loads(done.stdout)
    (result,) = found["results"]
    assert (result["item"], result["status"]) == ("s3_graph", "not run")
    assert "needs cuda or npu: not run here (cpu)" in result["reason"]
    assert done.returncode == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("omni-speech-accel")] == []


def test_another_device_than_the_hosts_is_exit_code_two(small_checkpoint: Path) -> None:
    done = shell("bench", "--device", "cuda", "--model", str(small_checkpoint), "--json")
    assert done.returncode == 2
    assert "runs on cpu in this environment, not on cuda" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("arguments", [("bench", "--items", "s3_graph"), ("ab", "--a", "stock", "--b", "true")])
def test_bench_and_ab_hand_their_arguments_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Sequence[str]
) -> None:
    seen: dict[str, Any] = {}

    def run_bench(console: object, choose: Any, **options: Any) -> None:
        seen.update(options, arms=[arm.name for arm in choose("cuda")])
        raise RunError("seen")

    monkeypatch.setattr(command, "run_bench", run_bench)
    shown = invoke(
        *arguments, "--model", str(tmp_path), "--device", "cuda", "--size", "full", "--streams", "3", "--repeats", "2",
        "--chunks", "4", "--quick", "--extra", "a=1", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert shown.stderr == "error: seen\n"
    assert seen.pop("arms") == (["A", "B"] if arguments[0] == "ab" else ["stock", "s3_graph"])
    assert seen == {
        "model": tmp_path, "device": "cuda", "size": "full", "streams": 3, "repeats": 2, "chunks": 4, "quick": True,
        "extra": {"a": 1}, "out": tmp_path / "out",
    }  # fmt: skip
