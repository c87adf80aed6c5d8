# SPDX-License-Identifier: Apache-2.0
"""What a pass of `bench` does: how many streams say what, in voices that no pass before had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_speech_accel.errors import UsageError
from omni_speech_accel.measure.driver import Payload, stream_payloads
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.synthetic.references import Reference, distinct_references


@dataclass(frozen=True)
class Workload:
    """What each pass does. ``chunks``: payloads per stream, the first and the last included."""

    streams: int = 8
    chunks: int = 4
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.streams < 1 or self.repeats < 1:
            raise UsageError("at least one stream and one measured pass are needed")
        if self.chunks < 3:
            raise UsageError("a stream needs at least three chunks: a first, a steady and a last one")


@dataclass
class Pass:
    """The work of one pass, the same for both arms. ``paths``: the references as files."""

    number: int
    paths: list[Path]
    steps: list[list[Payload]]


def plan(
    workload: Workload,
    profile: StageProfile,
    number: int,
    tokens: Sequence[int],
    voices: Sequence[Reference],
    scratch: Path,
) -> Pass:
    """The pass of this ``number``; ``tokens`` are what the streams say, each from another place on."""
    references = distinct_references(workload.streams, profile.reference_seconds, take=number, voices=voices)
    length = workload.chunks * profile.chunk_frames
    streams = []
    for index, reference in enumerate(references):
        start = (index * 37) % max(1, len(tokens))
        codes = [tokens[(start + offset) % len(tokens)] for offset in range(length)]
        streams.append(stream_payloads(f"pass{number}-stream{index}", codes, profile, reference))
    paths = write_references(scratch, references, number)
    return Pass(number, paths, [list(step) for step in zip(*streams, strict=True)])


def write_references(directory: Path, references: Sequence[Reference], number: int) -> list[Path]:
    """Write the references of pass ``number``; returns their paths in order."""
    import soundfile

    paths = []
    for index, reference in enumerate(references):
        path = directory / f"pass{number}-reference{index}.wav"
        soundfile.write(path, reference.samples, reference.rate)
        paths.append(path)
    return paths
