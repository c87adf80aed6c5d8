# SPDX-License-Identifier: Apache-2.0
"""Real speech for references, as the host and its tokenizer ship it, in the lengths and formats that people send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_speech_accel.errors import BenchError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Waveform = npt.NDArray[np.float32]

__all__ = ["REFERENCE_RATE", "Reference", "distinct_references", "reference_files", "speech"]

REFERENCE_RATE = 24000
"""Rate that the stage folds every reference to. Source: ``_REF_TARGET_SAMPLE_RATE`` of the host's Code2Wav module."""


@dataclass(frozen=True)
class Reference:
    """A mono reference. ``samples``: float32 ``[n]`` in [-1, 1]; ``rate``: Hz."""

    name: str
    samples: Waveform
    rate: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / self.rate


def _soundfile() -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise BenchError("soundfile reads and writes the audio: pip install 'omni-speech-accel[bench]'") from error
    return soundfile


def _resample(samples: Waveform, rate: int, target: int) -> Waveform:
    """Linear interpolation after a moving average: enough for a reference voice, and the same on every machine."""
    import numpy as np

    if rate == target:
        return samples
    if rate > target:
        width = round(rate / target)
        samples = np.convolve(samples, np.full(width, 1.0 / width), mode="same").astype(np.float32)
    positions = np.arange(int(len(samples) * target / rate)) * (rate / target)
    resampled: Waveform = np.interp(positions, np.arange(len(samples)), samples).astype(np.float32)
    return resampled


def speech(rate: int = REFERENCE_RATE) -> list[Reference]:
    """The speech that ships with the host and its tokenizer, at ``rate``.

    Raises:
        BenchError: It is not here.
    """
    from omni_speech_accel.synthetic.references import host_speech

    soundfile = _soundfile()
    try:
        paths = host_speech()
    except FileNotFoundError as error:
        raise BenchError(str(error)) from error
    found = []
    for path in paths:
        samples, file_rate = soundfile.read(path, dtype="float32", always_2d=True)
        found.append(Reference(path.stem, _resample(samples.mean(axis=1), int(file_rate), rate), rate))
    return found


def distinct_references(
    count: int, seconds: float, *, take: int = 0, voices: Sequence[Reference] = ()
) -> list[Reference]:
    """``count`` different pieces of real speech of ``seconds`` each, never the same piece twice.

    Args:
        count: How many.
        seconds: Length of each; shorter speech is repeated up to it.
        take: Which set of pieces: two takes share no piece, so that a second pass is cold again.
        voices: Speech to cut from; default: :func:`speech`.
    """
    import numpy as np

    voices = voices or speech()
    wanted = round(seconds * REFERENCE_RATE)
    pieces = []
    for index in range(count):
        voice = voices[index % len(voices)]
        repeated = np.tile(voice.samples, -(-(wanted + len(voice.samples)) // len(voice.samples)))
        # A shift by 10 ms makes other samples, other features and another cache key of the same speech.
        shift = ((take * count + index) * 240) % len(voice.samples)
        piece = np.ascontiguousarray(repeated[shift : shift + wanted], dtype=np.float32)
        pieces.append(Reference(f"{voice.name}+{shift / REFERENCE_RATE:.2f}s", piece, REFERENCE_RATE))
    return pieces


@dataclass(frozen=True)
class _File:
    name: str
    seconds: float
    rate: int = REFERENCE_RATE
    subtype: str = "PCM_16"
    channels: int = 1
    suffix: str = ".wav"
    silent: bool = False


# Lengths: MiniCPM-o folds to 6 s; 30 s is the tokenizer's longest single window, 31 s its long path.
_QUICK = (
    _File("6 s, 24 kHz", 6.0, subtype="FLOAT"),
    _File("1 s, 16 kHz", 1.0, rate=16000),
    _File("2.5 s, 48 kHz stereo", 2.5, rate=48000, channels=2),
    _File("31 s, 16 kHz", 31.0, rate=16000),
)
_ALL = (
    *_QUICK,
    _File("4.1 s, 16 kHz", 4.1, rate=16000),
    _File("30 s, 16 kHz", 30.0, rate=16000),
    _File("3 s, 8 kHz", 3.0, rate=8000),
    _File("2 s, 44.1 kHz, 24 bit", 2.0, rate=44100, subtype="PCM_24"),
    _File("3 s, 24 kHz FLAC", 3.0, suffix=".flac"),
    _File("1 s of digital silence", 1.0, silent=True),
)


def reference_files(directory: Path, *, quick: bool = False) -> Iterator[tuple[str, Path]]:
    """Write the reference files that `verify` extracts features from; yields (what it is, path)."""
    import numpy as np

    soundfile = _soundfile()
    directory.mkdir(parents=True, exist_ok=True)
    for index, spec in enumerate(_QUICK if quick else _ALL):
        voices = speech(spec.rate)
        voice = voices[index % len(voices)].samples
        wanted = round(spec.seconds * spec.rate)
        samples = np.tile(voice, -(-wanted // len(voice)))[:wanted]
        if spec.silent:
            samples = np.zeros_like(samples)
        if spec.channels > 1:
            samples = np.stack([samples * (1.0 - 0.2 * channel) for channel in range(spec.channels)], axis=1)
        path = directory / f"reference{index}{spec.suffix}"
        soundfile.write(path, samples, spec.rate, subtype=spec.subtype)
        yield spec.name, path
