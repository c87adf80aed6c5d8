# SPDX-License-Identifier: Apache-2.0
"""What the device tests and a measuring script share: the full-size model directory and whole streams.

No pytest in here. The stage itself is built and driven by :mod:`omni_speech_accel.measure.driver`, as ``verify`` and
``bench`` do it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from omni_speech_accel.measure.driver import Code2WavDriver, Payload, stream_payloads
from omni_speech_accel.measure.stage_profile import StageProfile, stage_profile
from omni_speech_accel.synthetic.references import Reference
from tests.fixtures_checkpoint import _code_digest, cache_folder

SAMPLES_PER_CODE = 960  # 24 kHz audio, 25 codec tokens a second
CODEBOOK = 6561  # flow.yaml: vocab_size
LOOKAHEAD = 3  # codec tokens; flow.yaml: pre_lookahead_len


def checkpoint(size: str = "full") -> Path:
    """A seed 0 model directory of ``size`` (``full``: 1.2 GB), written once and shared between processes."""
    from omni_speech_accel.synthetic import read_checkpoint_info, write_checkpoint

    folder = cache_folder()
    directory = folder / f"{size}-{_code_digest()}"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_checkpoint_info(directory) is None:
            write_checkpoint(directory, size="full" if size == "full" else "small")
    return directory


def profile_with(
    platform: str, extra: Mapping[str, Any] | None = None, additional_config: Mapping[str, Any] | None = None
) -> StageProfile:
    """The profile that ships for ``platform``, with connector ``extra`` and ``additional_config`` keys changed."""
    profile = stage_profile(platform, extra)
    return replace(profile, additional_config={**profile.additional_config, **(additional_config or {})})


def random_stream(
    name: str, chunks: int, profile: StageProfile, *, seed: int, reference: Reference | None = None
) -> list[Payload]:
    """The payloads of one stream of ``chunks`` full windows of random codec tokens. ``None``: the default voice."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, CODEBOOK, (chunks * profile.chunk_frames,), generator=generator)
    return stream_payloads(name, codes.tolist(), profile, reference)


def random_streams(
    prefix: str, chunks: int, profile: StageProfile, references: Sequence[Reference | None], *, seed: int = 0
) -> list[list[Payload]]:
    """One stream per entry of ``references``, named ``prefix0``, ``prefix1``, ...; each says something else."""
    return [
        random_stream(f"{prefix}{index}", chunks, profile, seed=seed + index, reference=reference)
        for index, reference in enumerate(references)
    ]


def stream_samples(payloads: Sequence[Payload]) -> int:
    """How many samples the whole stream's audio has: its context too, since the first one is silence codes."""
    new = sum(len(payload.codes) for payload in payloads) - LOOKAHEAD * (len(payloads) - 1)
    return new * SAMPLES_PER_CODE


def forward(driver: Code2WavDriver, payloads: Sequence[Payload], *, seed: int | None = None) -> list[torch.Tensor]:
    """One forward of the stage; per payload its audio, float32 ``[n]`` at 24 kHz, on the stage's device.

    ``seed`` fixes the vocoder's noise, which the stage draws during the call.
    """
    if seed is not None:
        torch.manual_seed(seed)
    return driver.step(payloads)


def speak(driver: Code2WavDriver, streams: Sequence[Sequence[Payload]], *, seed: int = 0) -> list[torch.Tensor]:
    """Run whole ``streams`` together, one payload of each per forward, and end them.

    Returns:
        Per stream its audio, float32 ``[n]`` at 24 kHz, on the host. The same ``seed`` gives the same vocoder noise.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in streams]
    for step in range(max(len(stream) for stream in streams)):
        live = [index for index, stream in enumerate(streams) if step < len(stream)]
        audio = forward(driver, [streams[index][step] for index in live], seed=seed + step)
        for index, samples in zip(live, audio, strict=True):
            parts[index].append(samples.cpu())
    driver.finish([stream[0].stream for stream in streams])
    return [torch.cat(part) for part in parts]


if __name__ == "__main__":
    print(checkpoint())
