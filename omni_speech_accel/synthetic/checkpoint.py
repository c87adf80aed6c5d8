# SPDX-License-Identifier: Apache-2.0
"""Writes a random-weight MiniCPM-o speech model directory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from omni_speech_accel.synthetic.flow import FULL, SMALL, write_flow
from omni_speech_accel.synthetic.references import host_speech
from omni_speech_accel.synthetic.speaker import write_speaker
from omni_speech_accel.synthetic.tokenizer import write_tokenizer
from omni_speech_accel.synthetic.vocoder import write_vocoder

Size = Literal["full", "small"]

# Present in every directory written here, and the licence to replace one.
MARKER = "omni_speech_accel_checkpoint.json"
# Raised when the same seed starts to give other weights, so that a cached directory is not mistaken for a current one.
FORMAT = 3


@dataclass(frozen=True)
class CheckpointInfo:
    """What :func:`write_checkpoint` wrote."""

    directory: Path
    seed: int
    size: Size
    # number of weights per part: tokenizer, speaker, flow, vocoder
    weights: dict[str, int]
    seconds: float

    @property
    def token2wav(self) -> Path:
        """The folder that ``StepAudio2Token2WavCore`` takes as its ``model_path``."""
        return self.directory / "assets" / "token2wav"

    @property
    def default_reference(self) -> Path:
        """The WAV that MiniCPM-o uses for a request without a reference."""
        return self.directory / "assets" / "HT_ref_audio.wav"


def read_checkpoint_info(directory: str | Path) -> CheckpointInfo | None:
    """The record of a directory that this version of :func:`write_checkpoint` wrote; None for anything else."""
    directory = Path(directory)
    try:
        record = json.loads((directory / MARKER).read_text())
        if record.pop("format") != FORMAT:
            return None
        return CheckpointInfo(directory=directory, **record)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_checkpoint(
    directory: str | Path,
    *,
    seed: int = 0,
    size: Size = "full",
    reference_wav: str | Path | None = None,
    force: bool = False,
) -> CheckpointInfo:
    """Write a random-weight speech model that the stock host loads with ``strict=True``.

    ``directory`` then holds ``assets/`` as MiniCPM-o lays it out and ``token2wav`` as Step-Audio 2 does. ``full`` has
    the sizes of the released model (1.2 GB); ``small`` shrinks the flow, the only part whose size the host does not
    fix (0.7 GB). ``reference_wav`` becomes the default reference; without it, real speech that ships with the host
    does. The same seed gives the same tensors, bit for bit.

    The directory appears whole or not at all. One that is not empty and was not written here is kept, with
    ``FileExistsError``, unless ``force``. Raises ``ValueError`` on an unknown size, ``FileNotFoundError`` when
    there is no reference WAV, ``ImportError`` where the host or its codec packages are not installed.
    """
    if size not in ("full", "small"):
        raise ValueError(f"size is 'full' or 'small', not {size!r}")
    directory = Path(directory).absolute()
    reference = Path(reference_wav) if reference_wav is not None else host_speech()[0]
    if not reference.is_file():
        raise FileNotFoundError(f"reference WAV {reference} does not exist")
    started = time.perf_counter()
    with _replacing(directory, force=force) as draft:
        token2wav = draft / "assets" / "token2wav"
        token2wav.mkdir(parents=True)
        shutil.copyfile(reference, draft / "assets" / "HT_ref_audio.wav")
        weights = {
            "tokenizer": write_tokenizer(token2wav / "speech_tokenizer_v2_25hz.onnx", seed),
            "speaker": write_speaker(token2wav / "campplus.onnx", seed),
            "flow": write_flow(token2wav, seed, FULL if size == "full" else SMALL),
            "vocoder": write_vocoder(token2wav / "hift.pt", seed),
        }
        try:
            (draft / "token2wav").symlink_to(Path("assets") / "token2wav", target_is_directory=True)
        except OSError:  # a file system without links
            shutil.copytree(token2wav, draft / "token2wav")
        info = CheckpointInfo(directory, seed, size, weights, round(time.perf_counter() - started, 1))
        record = {"format": FORMAT, **{key: value for key, value in asdict(info).items() if key != "directory"}}
        (draft / MARKER).write_text(json.dumps(record, indent=1) + "\n")
    return info


@contextmanager
def _replacing(directory: Path, *, force: bool) -> Iterator[Path]:
    """An empty sibling directory that takes the place of ``directory`` when the block ends without an exception."""
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).is_file() and not force:
        raise FileExistsError(
            f"{directory} is not empty and was not written by omni_speech_accel; pass force to replace"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        draft = scratch / "new"
        draft.mkdir()
        yield draft
        if directory.exists():
            os.rename(directory, scratch / "old")
        os.rename(draft, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
