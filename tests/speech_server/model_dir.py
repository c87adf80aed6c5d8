# SPDX-License-Identifier: Apache-2.0
"""The model directory that the test pipelines are served from.

Every stage of a pipeline has the directory of the served model. This one is a tiny Llama, for the talker and for what
the API server reads (configuration, tokenizer), with links to the assets of a speech checkpoint.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from omni_speech_accel.synthetic import Size, read_checkpoint_info, write_checkpoint

_TINY_MODEL = Path(__file__).resolve().parent / "model"


def ensure_checkpoint(directory: Path, *, size: Size, seed: int = 0) -> Path:
    """``directory``, holding a random-weight speech checkpoint of that size and seed; written (40 s) if it is not."""
    found = read_checkpoint_info(directory)
    if found is None or (found.size, found.seed) != (size, seed):
        write_checkpoint(directory, size=size, seed=seed)
    return directory


def build_model_dir(directory: Path, checkpoint: Path) -> Path:
    """Make ``directory`` a model that the test pipelines can be served from, with the weights of ``checkpoint``."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in _TINY_MODEL.iterdir():
        shutil.copyfile(source, directory / source.name)
    _write_safetensors(directory / "model.safetensors")
    # MiniCPM-o reads assets/, Step-Audio 2 reads token2wav/.
    for name, target in (("assets", "assets"), ("token2wav", "assets/token2wav")):
        link = directory / name
        link.unlink(missing_ok=True)
        link.symlink_to((checkpoint / target).absolute(), target_is_directory=True)
    return directory


def _write_safetensors(path: Path) -> None:
    """One float that no model has a place for.

    The speech stages build their backend in ``load_weights``, which the loader calls only where it finds a weight file.
    """
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "omni_speech_test_host.none": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)  # safetensors aligns its data to 8 bytes
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
