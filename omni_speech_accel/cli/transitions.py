# SPDX-License-Identifier: Apache-2.0
"""The ``transitions`` command of ``omni-speech-accel``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from omni_speech_accel.cli.options import Json, names_in
from omni_speech_accel.cli.output import FAILED, WRONG_INPUT, errors_reported, fail, ready_folder, stops_early
from omni_speech_accel.transitions import CannotCompare

# Seconds, dB: beyond this, and for NaN, a number is a mistake.
_MOST = 1e6


def _is_url(value: str) -> bool:
    return value.lower().startswith(("http://", "https://"))


def _url(value: str | None) -> str | None:
    if value is not None and not _is_url(value):
        raise typer.BadParameter(f"{value!r} is not an http:// or https:// URL")
    if value is not None:
        try:
            parts = urlsplit(value)
            wrong = "it names no host" if not parts.hostname else "it has a query" if parts.query else ""
            _ = parts.port  # raises for one that no machine has
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise typer.BadParameter(f"{value!r} is not the base URL of a server: {wrong}")
    return value and value.rstrip("/").removesuffix("/v1")


def _url_or_folder(value: str) -> str:
    if _is_url(value):
        return _url(value) or value
    if not (Path(value) / "recording.json").is_file():
        raise typer.BadParameter(f"{value!r} is neither an http:// or https:// URL nor a folder made by --record")
    return value


def _json_object(value: str | None, option: str) -> dict[str, Any]:
    from omni_speech_accel.transitions.inputs import parse_json

    if value is None:
        return {}
    try:
        text = Path(value[1:]).read_text(encoding="utf-8") if value.startswith("@") else value
        found = parse_json(text)
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{option}: {error}") from error
    if not isinstance(found, dict):
        raise CannotCompare(f"{option} must be a JSON object, got {type(found).__name__}")
    return found


def _sizes(value: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError as error:
        raise CannotCompare(f"--concurrency takes numbers such as 3,5,7, got {value!r}") from error


def _require_finite(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not abs(value) <= _MOST:
            raise CannotCompare(f"--{name.replace('_', '-')} must be a number of at most {_MOST:g}, got {value}")


def transitions(
    baseline: Annotated[
        str,
        typer.Option(
            help="The server taken as right: its base URL, e.g. http://127.0.0.1:8091, or a folder made by --record.",
            callback=_url_or_folder,
        ),
    ],
    candidate: Annotated[
        str | None, typer.Option(help="Base URL of the server to judge. Not with --record.", callback=_url)
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Run the baseline alone and keep what it says in this folder, for two servers that do not fit on the "
            "machine together. Then start the candidate in its place and give the folder as --baseline."
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            help="Stream counts to run each pattern at. Choose counts between the captured sizes, so that batches are "
            "padded, and at most max_num_seqs - 1, so that a joiner finds a free row."
        ),
    ] = "3,5,7",
    only: Annotated[
        str,
        typer.Option(
            help="Run these patterns only, comma separated: solo, padded, staggered, early-finish, cancel, late-join, "
            "slot-reuse, churn, recovery. Default: all."
        ),
    ] = "",
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Texts to speak, one a line; a line may be a JSON object with 'input' and further request fields "
            "(its own ref_audio, voice, ...). Needs short and long ones. Default: built-in English sentences."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the plan: texts, per-request seeds, random patterns. Same seed, same plan.")
    ] = 0,
    extra_body: Annotated[
        str | None,
        typer.Option(
            help="JSON object merged into every request, or @FILE that holds one: voice, ref_audio, ref_audio_codes, "
            "max_new_tokens, extra_params... It wins over everything; null removes a field."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name to send. Default: the first that each server lists.")
    ] = None,
    response_format: Annotated[Literal["pcm", "wav"], typer.Option(help="Audio format to ask for.")] = "pcm",
    stream_format: Annotated[
        Literal["sse", "audio"],
        typer.Option(help="sse: speech.audio.* events, whose end is explicit. audio: the raw bytes."),
    ] = "sse",
    pcm_tolerance: Annotated[
        int, typer.Option(min=0, help="Largest difference of a sample that still counts as equal, in int16 steps.")
    ] = 0,
    min_snr: Annotated[
        float | None,
        typer.Option(help="Also accept PCM whose signal-to-noise ratio against the baseline reaches this, in dB."),
    ] = None,
    pcm: Annotated[
        bool, typer.Option("--pcm/--no-pcm", help="Compare samples, or completeness and duration alone.")
    ] = True,
    duration_tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference in duration that still counts as equal, in seconds.")
    ] = 0.0,
    baseline_runs: Annotated[
        int,
        typer.Option(
            min=1, help="Runs of the baseline. Their distance from each other is the noise floor; 1 measures none."
        ),
    ] = 2,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of the candidate; each one must match.")] = 1,
    attempts: Annotated[
        int, typer.Option(min=1, help="Runs to allow until a transition is seen to have happened on a server.")
    ] = 2,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest time for one stream, in seconds.")] = 300.0,
    stall_timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest time without a byte on one stream, in seconds.")
    ] = 120.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Bearer token, if the servers ask for one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.json, rows.csv and the WAVs of every stream that is not ok."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that two speech servers say the same while their batches change under them.

    Sends the same seeded streaming /v1/audio/speech requests to both, in patterns that force padded batches and
    decode -> mixed -> decode: streams that start one after another, end early, disconnect, join late, take a freed
    row. Compares completeness, duration and PCM, stream by stream, and says per transition what is wrong: truncated,
    swapped rows, wrong length, an error inside a 200, a cut stream, different PCM.

    The baseline runs twice first. What it differs from itself by is reported, and never blamed on the candidate.

    Exit code: 0 all transitions match (or were recorded); 1 something differs, or could not be shown (the baseline
    does not repeat itself, or a transition did not happen); 2 wrong usage, a folder that cannot be written, or a
    server that does not answer; 130 interrupted before a comparison began. Ctrl-C and SIGTERM end one early: what was
    compared is reported, exit code 1.

    Example: omni-speech-accel transitions --baseline http://127.0.0.1:8091 --candidate http://127.0.0.1:8092
    --extra-body '{"max_new_tokens": 500}' --out transitions-out

    One after the other on the same cards: omni-speech-accel transitions --baseline http://127.0.0.1:8091
    --record before; restart the server in the other mode; omni-speech-accel transitions --baseline before
    --candidate http://127.0.0.1:8091
    """
    with errors_reported(as_json), stops_early():
        from rich.console import Console

        from omni_speech_accel.transitions import check, client, compare, report
        from omni_speech_accel.transitions.inputs import builtin_pool, load_pool
        from omni_speech_accel.transitions.plan import build_plan
        from omni_speech_accel.transitions.recording import load_recording, save_recording

        if (candidate is None) == (record is None):
            raise CannotCompare("give either --candidate, to compare, or --record, to keep the baseline for later")
        if record is not None and not _is_url(baseline):
            raise CannotCompare("--record needs the URL of a server as --baseline, not a recording")
        if record is not None and out is not None:
            raise CannotCompare("--out keeps a comparison, and --record makes none: give one of them")
        body = _json_object(extra_body, "--extra-body")
        _require_finite(
            duration_tolerance=duration_tolerance, min_snr=min_snr, timeout=timeout, stall_timeout=stall_timeout
        )
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise CannotCompare("--api-key must be printable ASCII: it goes into an HTTP header")
        if min_snr is not None and not pcm:
            raise CannotCompare("--min-snr and --no-pcm exclude each other")
        plan = build_plan(
            builtin_pool() if inputs is None else load_pool(inputs), _sizes(concurrency), seed, names_in(only)
        )
        source = baseline if _is_url(baseline) else load_recording(Path(baseline))
        ready_folder(record, "--record")
        ready_folder(out)
        notes = Console(stderr=True)

        def tell(result: check.TransitionResult) -> None:
            # A run can take an hour; what is known already should not wait for its end, or be lost with it.
            for line in report.problems_of(result) or [f"{result.transition.name}: ok"]:
                notes.print(line, markup=False, highlight=False, soft_wrap=True)

        config = check.TransitionsConfig(
            baseline=source,
            candidate=candidate or "",
            plan=plan,
            request=client.RequestOptions(model, response_format, stream_format, body, timeout, stall_timeout, api_key),
            tolerance=compare.Tolerance(pcm_tolerance, min_snr, duration_tolerance, pcm),
            baseline_runs=baseline_runs,
            repeat=repeat,
            attempts=attempts,
            on_start=lambda transition: notes.print(f"{transition.name} ...", highlight=False),
            on_result=tell,
        )
        if record is not None:
            recording, wrong = check.record_baseline(config)
            if recording.runs:
                save_recording(recording, record)
            return _say_recorded(record if recording.runs else None, wrong, as_json)
        found = check.run_transitions(config)
    unsaved = None
    if out is not None:
        try:
            report.save(found, out)
        except OSError as error:
            unsaved = error
    if as_json:
        typer.echo(json.dumps(report.to_json(found), indent=2))
    else:
        report.print_report(found, Console())
    if unsaved is not None:  # the report is printed already, and is the one document
        raise fail(f"--out: {unsaved}", False, WRONG_INPUT)
    if not found.passed:
        raise typer.Exit(FAILED)


def _say_recorded(folder: Path | None, wrong: list[str], as_json: bool) -> None:
    if as_json:
        where = None if folder is None else str(folder)
        typer.echo(json.dumps({"recording": where, "passed": not wrong, "problems": wrong}, indent=2))
    else:
        for line in wrong:
            typer.echo(f"- {line}")
        done = "nothing was recorded" if folder is None else f"recorded in {folder}"
        typer.echo(done + (", but not fit to compare with" if wrong and folder is not None else ""))
    if wrong:
        raise typer.Exit(FAILED)
