# SPDX-License-Identifier: Apache-2.0
"""Options that several commands take, and how their values are read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from omni_speech_accel.errors import UsageError


class PlatformName(str, Enum):
    """Devices that the host knows."""

    auto = "auto"
    cuda = "cuda"
    npu = "npu"
    cpu = "cpu"


class ModelSize(str, Enum):
    """Sizes of the random-weight model."""

    small = "small"
    full = "full"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="A MiniCPM-o model directory (holds assets/token2wav). Default: a random-weight one, made and removed.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
Device = Annotated[
    PlatformName,
    typer.Option(help="Device that must be here; auto takes the one vllm-omni runs on in this environment."),
]
Size = Annotated[ModelSize, typer.Option(help="Size of the random-weight model; full has the released model's sizes.")]
Extra = Annotated[
    list[str] | None,
    typer.Option(
        "--extra",
        help="Connector extra of the stage, KEY=VALUE, beside the shipped profile's; may repeat. "
        "Example: --extra token2wav_n_timesteps=10",
        show_default=False,
    ),
]

BenchOut = Annotated[
    Path | None, typer.Option("--out", help="Folder for bench.json, bench.csv, bench.png and one WAV per arm.")
]
Streams = Annotated[int | None, typer.Option(min=1, help="Streams at once. Default: 8, on CPU 2.", show_default=False)]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Measured passes per arm. Default: 5, on CPU 3.", show_default=False)
]
Chunks = Annotated[
    int | None,
    typer.Option(min=3, help="Payloads per stream, about a second each. Default: 5, on CPU 3.", show_default=False),
]
Quick = Annotated[bool, typer.Option("--quick", help="Two streams, three chunks, one measured pass: a smoke test.")]
BenchSize = Annotated[
    ModelSize | None,
    typer.Option("--size", help="Size of the random-weight model. Default: full, on CPU small.", show_default=False),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the results of an earlier run in the --out folder.")
]


def names_in(value: str | None) -> list[str]:
    """Comma-separated names."""
    return [name.strip() for name in (value or "").split(",") if name.strip()]


def extras_in(pairs: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs, values read as YAML.

    Raises:
        UsageError: A pair has no ``=``, or a value is no YAML.
    """
    found = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"--extra takes KEY=VALUE, not {pair!r}")
        found[key] = yaml_value(value, f"--extra {key}")
    return found


def yaml_value(text: str, option: str) -> Any:
    """An option's value.

    Raises:
        UsageError: It is no YAML.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{option}: no valid YAML: {error}") from error
