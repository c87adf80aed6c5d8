# SPDX-License-Identifier: Apache-2.0
"""The ``compare-modes`` command of ``omni-speech-accel``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from omni_speech_accel.cli.options import Json
from omni_speech_accel.cli.output import FAILED, OK, errors_reported, fail, stops_early

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def compare_modes(
    model: Annotated[str, typer.Option(help="Model to serve, as for vllm serve.")],
    dataset: Annotated[Path, typer.Option(help="Seed-TTS-Eval folder that holds LOCALE/meta.lst.")],
    reference: Annotated[Path, typer.Option(help="JSON file with the request fields of the reference.")],
    out: Annotated[Path, typer.Option(help="Folder for everything that is kept.")],
    a: Annotated[
        Path, typer.Option("--a", help="Deploy overlay of arm A. Default: in configs/.", show_default=False)
    ] = _CONFIGS / "fish_omni_npu_piecewise.yaml",
    b: Annotated[
        Path, typer.Option("--b", help="Deploy overlay of arm B. Default: in configs/.", show_default=False)
    ] = _CONFIGS / "fish_omni_npu_full.yaml",
    concurrency: Annotated[str, typer.Option(help="Client concurrencies.")] = "1,16,32,64",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most frames of a request.")] = 500,
    num_warmups: Annotated[int, typer.Option(min=0, help="Client warm-ups of a run.")] = 1,
    discard: Annotated[int, typer.Option(min=0, help="Discarded runs before the measured.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs per server start.")] = 2,
    locale: Annotated[Literal["en", "zh"], typer.Option(help="Part of the dataset.")] = "en",
    seed: Annotated[int, typer.Option(help="Seed of every request.")] = 42,
    no_transitions: Annotated[
        bool, typer.Option("--no-transitions", help="Leave out the comparison of outputs.")
    ] = False,
    transitions_args: Annotated[str, typer.Option(help="More arguments for omni-speech-accel transitions.")] = "",
    vllm: Annotated[str, typer.Option(help="The vllm program; by default the one on PATH.")] = "vllm",
    port: Annotated[int, typer.Option(help="Port of the server.")] = 18770,
    serve_args: Annotated[str, typer.Option(help="More arguments for vllm serve, as one string.")] = "",
    bench_args: Annotated[str, typer.Option(help="More arguments for vllm bench serve, as one string.")] = "",
    startup_timeout: Annotated[float, typer.Option(help="Seconds to healthy.")] = 3600,
    run_timeout: Annotated[float, typer.Option(help="Seconds for one run.")] = 7200,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every command in order and start nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep finished server visits in --out, do the others.")
    ] = False,
    as_json: Json = False,
) -> None:
    """PIECEWISE against FULL_AND_PIECEWISE on fish_omni, matched: one command, every log and raw result kept.

    Starts `vllm serve --omni` with one deploy overlay after the other in the order A B B A, drives each server with the
    host's own `vllm bench serve --omni` client (streamed /v1/audio/speech, Seed-TTS-Eval en, one fixed pre-encoded
    reference, max_tokens 500, 64 prompts, 1 warm-up request), and writes what every run measured and the ratios with
    their minimum and maximum. Per server start and concurrency, one run is discarded before the measured ones. On the
    first visit to either server it also runs `transitions`: the seeded outputs of B, stream by stream, against those
    recorded on A.

    --reference is merged into every request. For a pre-encoded reference it holds
    {"ref_audio_codes": [[...], ...], "ref_text": "what the reference says"}, codes shaped [codebooks, frames].

    Exit code: 0 done, and the outputs match; 1 a run failed (continue with --resume) or the outputs do not match;
    2 wrong usage; 130 interrupted, the server stopped; --resume continues.

    Example: omni-speech-accel compare-modes --model MODEL --dataset seedtts_testset --reference reference.json
    --out comparison
    """
    options = {name: value for name, value in locals().items() if name not in ("dry_run", "resume", "as_json")}
    from omni_speech_accel.measure.made_on import commit
    from omni_speech_accel.transitions import modes
    from omni_speech_accel.transitions.processes import RunFailed

    with errors_reported(as_json), stops_early():
        comparison = modes.Comparison(modes.Options(**options))
        if dry_run:
            lines = modes.command_lines(comparison)
            typer.echo(json.dumps({"commands": lines}, indent=2) if as_json else "\n".join(lines))
            return
        try:
            summary = modes.run(comparison, commit(), resume)
        except RunFailed as error:
            advice = f"What was measured so far is in {out}; --resume goes on."
            raise fail(f"{error}\n{advice}", as_json, FAILED) from error
    typer.echo(json.dumps(summary, indent=2) if as_json else summary["table"])
    raise typer.Exit(FAILED if summary["outputs_match"] is False else OK)
