# SPDX-License-Identifier: Apache-2.0
"""Speaker features of synthetic speech, for checks that must not depend on a recording."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_speech_accel.campplus.onnx_weights import FEATURE_BINS


def speech_like_fbank(frames: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Mean-normalised log-mel fbank ``[frames, 80]`` with the statistics of speech, from a seed.

    Moving formant ridges over a tilted floor under a syllable-rate envelope, in natural-log units as kaldi's fbank.
    White noise would do the same sums but drives every channel to the same level, where a wrong mask hardly shows.
    """
    rng = np.random.default_rng([seed, frames])
    time = np.arange(frames)[:, None] / 100.0
    bins = np.arange(FEATURE_BINS)[None, :]
    envelope = 3.0 * np.sin(2 * np.pi * (3.1 * time + rng.uniform())) + 1.5 * np.sin(2 * np.pi * 0.7 * time)
    spectrum = 12.0 - 0.05 * bins + envelope
    for centre, depth in ((12, 6), (30, 10), (52, 8), (68, 5)):
        ridge = centre + depth * np.sin(2 * np.pi * (rng.uniform(0.4, 1.6) * time + rng.uniform()))
        spectrum = spectrum + 4.0 * np.exp(-0.5 * ((bins - ridge) / 4.0) ** 2)
    spectrum = spectrum + rng.normal(scale=1.2, size=(frames, FEATURE_BINS))
    centred: npt.NDArray[np.float32] = (spectrum - spectrum.mean(axis=0, keepdims=True)).astype(np.float32)
    return centred
