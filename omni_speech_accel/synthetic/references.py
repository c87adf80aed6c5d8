# SPDX-License-Identifier: Apache-2.0
"""Reference WAVs of real speech, cut from the recordings that ship with the host and with s3tokenizer."""

from __future__ import annotations

import importlib.util
import os
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_speech_accel.errors import Unavailable

Waveform = npt.NDArray[np.float32]

# Recordings by voice, inside the installed packages. The two Mandarin sentences are one speaker's, 4 s each, and soft
# (peak 0.07), hence their gains below.
_SOURCES: dict[str, tuple[tuple[str, str], ...]] = {
    "female": (("vllm_omni", "model_executor/models/step_audio2/assets/default_female.wav"),),
    "male": (("vllm_omni", "model_executor/models/step_audio2/assets/default_male.wav"),),
    "mandarin": (
        ("s3tokenizer", "assets/BAC009S0764W0121.wav"),
        ("s3tokenizer", "assets/BAC009S0764W0122.wav"),
    ),
}

# Seconds: minicpmo_4_5_code2wav folds every reference to this length by default (_REF_MAX_SECONDS).
REFERENCE_SECONDS = 6.0


@dataclass(frozen=True)
class _Cut:
    """``seconds`` of a voice from ``start``, played ``speed`` times as fast (pitch moves along), times ``gain``."""

    voice: str
    start: float
    seconds: float = REFERENCE_SECONDS
    speed: float = 1.0
    gain: float = 1.0


_SIX_SECONDS = (
    _Cut("female", 0.0),
    _Cut("male", 0.0),
    _Cut("mandarin", 0.0, gain=5.0),
    _Cut("female", 3.0, gain=0.7),
    _Cut("male", 1.6, gain=0.6),
    _Cut("mandarin", 2.2, gain=4.0),
    _Cut("female", 1.0, speed=1.12, gain=0.9),
    _Cut("male", 0.4, speed=0.9),
    _Cut("mandarin", 0.5, speed=1.15, gain=6.0),
    _Cut("female", 2.0, speed=0.88),
    _Cut("male", 0.2, speed=1.18, gain=0.8),
    _Cut("mandarin", 1.0, speed=0.86, gain=4.5),
)

_VARIED = (
    _Cut("female", 0.5, 1.0),
    _Cut("male", 1.0, 1.7),
    _Cut("mandarin", 0.3, 2.5, gain=5.0),
    _Cut("female", 2.0, 3.3),
    _Cut("male", 0.7, 4.2),
    _Cut("mandarin", 1.2, 5.1, gain=5.0),
    _Cut("male", 0.0, 7.5),
    _Cut("female", 0.0, 9.0),
)


def _source_paths(voice: str) -> list[Path]:
    paths = []
    for package, relative in _SOURCES[voice]:
        # find_spec of a top-level package imports nothing; importing the host takes ten seconds
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"no reference speech: package {package} is not installed")
        path = Path(next(iter(spec.submodule_search_locations))) / relative
        if not path.is_file():
            raise FileNotFoundError(f"no reference speech: this {package} does not ship {relative}")
        paths.append(path)
    return paths


def host_speech() -> list[Path]:
    """The recordings themselves, one per voice, the host's female voice first. ``FileNotFoundError`` when absent."""
    return [_source_paths(voice)[0] for voice in _SOURCES]


def _read_voice(voice: str) -> tuple[npt.NDArray[np.float64], int]:
    """Samples in -1..1 and their rate in Hz; the voice's recordings joined."""
    parts = []
    rates = set()
    for path in _source_paths(voice):
        with wave.open(str(path)) as stream:
            if stream.getsampwidth() != 2 or stream.getnchannels() != 1:
                raise ValueError(f"{path} is not 16-bit mono")
            rates.add(stream.getframerate())
            parts.append(np.frombuffer(stream.readframes(stream.getnframes()), dtype="<i2") / 32768.0)
    (rate,) = rates
    return np.concatenate(parts), rate


def _stretch(samples: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.float64]:
    """Band-limited resampling to ``length`` samples."""
    if length == len(samples):
        return samples
    spectrum = np.fft.rfft(samples)
    keep = min(len(spectrum), length // 2 + 1)
    out = np.zeros(length // 2 + 1, dtype=complex)
    out[:keep] = spectrum[:keep]
    stretched: npt.NDArray[np.float64] = np.fft.irfft(out, n=length) * (length / len(samples))
    return stretched


def _render(cut: _Cut, voices: dict[str, tuple[npt.NDArray[np.float64], int]]) -> tuple[npt.NDArray[np.int16], int]:
    samples, rate = voices[cut.voice]
    length = round(cut.seconds * rate)
    start = round(cut.start * rate)
    taken = samples[start : start + round(length * cut.speed)]
    if len(taken) < round(length * cut.speed):
        raise ValueError(f"the {cut.voice} recording is too short for {cut}")
    out = np.clip(_stretch(taken, length) * cut.gain, -1.0, 32767 / 32768)
    return np.round(out * 32768.0).astype("<i2"), rate


def _write_all(directory: str | Path, prefix: str, cuts: tuple[_Cut, ...]) -> list[Path]:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    voices = {voice: _read_voice(voice) for voice in _SOURCES}
    paths = []
    for index, cut in enumerate(cuts):
        path = directory / f"{prefix}_{index:02d}_{cut.voice}_{cut.seconds:g}s.wav"
        samples, rate = _render(cut, voices)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with wave.open(str(draft), "wb") as stream:
            stream.setnchannels(1)
            stream.setsampwidth(2)
            stream.setframerate(rate)
            stream.writeframes(samples.tobytes())
        os.replace(draft, path)
        paths.append(path)
    return paths


def reference_wavs(directory: str | Path) -> list[Path]:
    """Write twelve distinct references of exactly six seconds into ``directory`` and return their paths.

    Real speech of three voices, at different places, speeds and levels, 16-bit mono at 48 or 16 kHz as recorded. The
    same files every time. Raises ``FileNotFoundError`` where the host or s3tokenizer is not installed.
    """
    return _write_all(directory, "reference", _SIX_SECONDS)


def varied_reference_wavs(directory: str | Path) -> list[Path]:
    """Write eight references of 1 to 9 seconds, shortest first, into ``directory`` and return their paths."""
    return _write_all(directory, "varied", _VARIED)


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
        raise Unavailable("soundfile reads and writes the audio: pip install 'omni-speech-accel[bench]'") from error
    return soundfile


def speech(rate: int = REFERENCE_RATE) -> list[Reference]:
    """The speech that ships with the host and its tokenizer, one voice each, at ``rate``.

    Raises:
        FileNotFoundError: It is not here.
    """
    found = []
    for name in _SOURCES:
        samples, recorded = _read_voice(name)
        resampled = _stretch(samples, len(samples) * rate // recorded)
        found.append(Reference(name, np.clip(resampled, -1.0, 1.0).astype(np.float32), rate))
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
