# SPDX-License-Identifier: Apache-2.0
"""The small random-weight model directory that tests share.

Made once per state of the checkpoint code and kept in the folder that ``OSA_TEST_CHECKPOINT`` names (by default one in
the system's temporary folder), so that several pytest processes, at once or one after another, use the same one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

import omni_speech_accel.synthetic
from omni_speech_accel.synthetic import read_checkpoint_info, write_checkpoint

# Seconds without use after which a directory of another state of the code (0.7 GB) is removed.
_KEPT = 24 * 3600


def cache_folder() -> Path:
    """Where tests keep what is costly to make."""
    named = os.environ.get("OSA_TEST_CHECKPOINT")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"omni-speech-accel-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _code_digest() -> str:
    """Changes with the code that decides the weights, so that a test never runs on another version's directory."""
    digest = hashlib.sha256()
    package = Path(omni_speech_accel.synthetic.__file__).parent
    for source in [*sorted(package.glob("*.py")), package.parent / "campplus" / "synthetic_fbank.py"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


@pytest.fixture(scope="session")
def small_checkpoint() -> Path:
    """A ``size="small"``, seed 0 model directory. Shared between tests and processes: copy it before changing it."""
    folder = cache_folder()
    directory = folder / f"small-{_code_digest()}"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in folder.glob("small-*"):
            if other != directory and time.time() - other.stat().st_mtime > _KEPT:
                shutil.rmtree(other, ignore_errors=True)
        if read_checkpoint_info(directory) is None:
            write_checkpoint(directory, size="small")
        os.utime(directory)
    return directory
