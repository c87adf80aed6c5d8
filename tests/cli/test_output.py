# SPDX-License-Identifier: Apache-2.0
"""The command line where it cannot do as asked: errors as documents, and an output that cannot be written or shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from omni_speech_accel.cli import app as cli
from omni_speech_accel.cli import measure, output
from omni_speech_accel.errors import ReferenceMixup, RunError, Unavailable, UsageError
from omni_speech_accel.host import source as host
from omni_speech_accel.measure.report_files import PLOT_HINT
from omni_speech_accel.plugin.settings import SettingsError

COMMAND = (sys.executable, "-m", "omni_speech_accel")
ROOT = Path(__file__).resolve().parents[2]
NOBODY = ("--baseline", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:2")


def shell(*arguments: str, environ: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The command as a process."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        [*COMMAND, *arguments], stderr=subprocess.PIPE, env=given, timeout=120, check=False, **options
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("status", "--platform", "tpu"), "'--platform'"),
        (("status", "--nonsense"), "--nonsense"),
        (("nonsense",), "nonsense"),
        (("ab",), "'--a'"),
        (("transitions",), "'--baseline'"),
        (("transitions", "--baseline", "nowhere"), "nowhere"),
        (("transitions", *NOBODY[:2]), "give either --candidate"),
        (("transitions", *NOBODY, "--concurrency", "three"), "--concurrency takes numbers"),
        (("transitions", *NOBODY), "no server answers at http://127.0.0.1:"),
        (("verify", "--model", "nope"), "nope"),
        (("verify", "--out", __file__), "is a file, not a folder"),
    ],
)
def test_with_json_every_error_is_one_document_and_a_message_for_people(arguments: Sequence[str], words: str) -> None:
    result = CliRunner().invoke(cli.app, [*arguments, "--json"], env={"COLUMNS": "200", "VLLM_API_KEY": ""})
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert set(found) == {"error", "exit_code"}
    assert found["exit_code"] == 2
    assert words in found["error"]
    assert words in result.stderr
    without = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200", "VLLM_API_KEY": ""})
    assert (without.exit_code, without.stdout) == (2, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (Unavailable("x"), 2),
        (SettingsError("x"), 2),
        (FileNotFoundError("x"), 2),
        (ReferenceMixup("x"), 1),
        (RunError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_a_user_can_mend_is_exit_code_two_and_what_broke_is_one(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def run_verify(console: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(measure, "run_verify", run_verify)
    result = CliRunner().invoke(cli.app, ["verify", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["exit_code"] == code
    assert result.stderr.startswith("error: ")


def test_a_defect_keeps_its_traceback_and_is_a_document_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_verify(console: object, **options: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(measure, "run_verify", run_verify)
    result = CliRunner().invoke(cli.app, ["verify", "--json"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert json.loads(result.stdout) == {"error": "ZeroDivisionError: of ours", "exit_code": 1}
    assert CliRunner().invoke(cli.app, ["verify"]).stdout == ""


CODES = {output.OK, output.FAILED, output.WRONG_INPUT, output.INTERRUPTED, output.READER_GONE}


def test_the_readme_and_every_help_say_the_same_exit_codes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("Exit codes of every command: ")[1].split(". ")[0]
    assert {int(number) for number in re.findall(r"(?:^|; ?|;\n)(\d+) ", text)} == CODES
    for name in ("status", "verify", "bench", "ab", "config", "transitions"):
        shown = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "2000"}).stdout
        said = re.search(r"Exit code: (.*)", shown)
        assert said is not None
        codes = {int(number) for number in re.findall(r"(?:^|; )(\d+) ", said[1])}
        assert {0, 2, 130} <= codes <= CODES


def test_a_report_that_cannot_be_saved_is_printed_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from omni_speech_accel.transitions import check, report

    def save(found: object, folder: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(check, "run_transitions", lambda config: None)
    monkeypatch.setattr(report, "save", save)
    monkeypatch.setattr(report, "to_json", lambda found: {"passed": True})
    result = CliRunner().invoke(cli.app, ["transitions", *NOBODY, "--json", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"passed": True}
    assert "--out: no space" in result.stderr


class Report:
    """What `_report_bench` reads of a report, the table left out."""

    ok = True

    def as_json(self) -> str:
        return "{}"


@pytest.mark.parametrize("as_json", [True, False])
def test_bench_says_that_there_is_no_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr("omni_speech_accel.cli.tables.print_bench", lambda report: None)
    report: Any = Report()
    with pytest.raises(typer.Exit):
        measure._report_bench(report, ["bench.json", PLOT_HINT, "stock.wav"], Path("results"), as_json)
    shown = capsys.readouterr()
    assert PLOT_HINT in (shown.err if as_json else shown.out).splitlines()
    assert shown.out == "{}\n" if as_json else "results: bench.json, stock.wav\n" in shown.out


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("--help",), ("config", "minicpmo_4_5")])
def test_an_output_that_cannot_be_written_is_one_line(arguments: Sequence[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = shell(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode() == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("--help",), ("config", "minicpmo_4_5")])
def test_a_reader_that_has_gone_is_no_failure_of_an_item(arguments: Sequence[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = shell(*arguments, stdout=write)
    finally:
        os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


def test_a_folder_for_a_deploy_and_a_file_for_a_folder_are_named_as_such(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["status", "--deploy-config", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} is a folder" in result.stderr
    file = tmp_path / "afile"
    file.touch()
    for out in (file, file / "below"):
        result = CliRunner().invoke(cli.app, ["verify", "--out", str(out)])
        assert result.exit_code == 2
        assert result.stderr == f"error: --out: {file} is a file, not a folder\n"


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def test_a_path_that_the_locale_cannot_show_is_shown_escaped(tmp_path: Path) -> None:
    location = host.host_info().location
    assert location is not None
    path = tmp_path / "é.yaml"
    path.write_text(f"base_config: {location / 'deploy' / 'minicpmo_4_5.yaml'}\n")
    done = shell("status", "--platform", "cuda", "--deploy-config", str(path), environ=ASCII)
    assert done.returncode == 0, done.stderr
    assert b"\\udcc3\\udca9.yaml" in done.stdout
    assert b"Traceback" not in done.stderr


def test_config_writes_a_base_that_loads_or_none(tmp_path: Path) -> None:
    location = host.host_info().location
    assert location is not None
    path = tmp_path / "é.yaml"
    path.write_bytes((location / "deploy" / "minicpmo_4_5.yaml").read_bytes())
    arguments = ("config", str(path), "--profile", "minicpmo_4_5_cuda")
    done = shell(*arguments, environ=ASCII)
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"LC_ALL=C.UTF-8" in done.stderr
    overlay = tmp_path / "my.yaml"
    overlay.write_bytes(shell(*arguments, environ={"PYTHONUTF8": "1"}).stdout)
    assert shell("status", "--platform", "cuda", "--deploy-config", str(overlay)).returncode == 0
