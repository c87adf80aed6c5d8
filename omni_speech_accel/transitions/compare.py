# SPDX-License-Identifier: Apache-2.0
"""Judges a candidate's streams against the same streams of the baseline.

The baseline runs every transition more than once. What its own runs differ by is the noise floor: a candidate is never
blamed for less than that, and a stream that the baseline cannot repeat is reported as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from omni_speech_accel.transitions.client import Ending, StreamRecord

Pcm = npt.NDArray[np.int16]

# Two runs of a noisy server lie up to twice as far apart as each from their centre; a candidate that is no worse than
# that cannot be told from another run of the baseline.
NOISE_MARGIN = 2.0
# 20 ms at 24 kHz: the least that two streams must share before one is called the other's audio.
MIN_SWAP_SAMPLES = 480
# A stream that its own server repeats worse than this is too vague to recognise in another's place.
MIN_SWAP_SNR_DB = 20.0
DEFAULT_SAMPLE_RATE = 24_000


class Status(str, Enum):
    """What is known of a stream, or of a whole transition."""

    OK = "ok"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Fault(str, Enum):
    """What is wrong with a stream."""

    NONE = ""
    BASELINE_BROKEN = "baseline failed"
    ERROR_IN_BODY = "error inside a 200"
    MALFORMED = "malformed body"
    CUT = "cut stream"
    HTTP_ERROR = "HTTP error"
    TIMEOUT = "timeout"
    FORMAT = "different audio format"
    NO_AUDIO = "no audio"
    SWAPPED = "swapped rows"
    TRUNCATED = "truncated"
    LENGTH = "wrong length"
    PCM = "different PCM"
    NOISE = "baseline not reproducible"


_ENDING_FAULTS = {
    Ending.ERROR_IN_BODY: Fault.ERROR_IN_BODY,
    Ending.MALFORMED: Fault.MALFORMED,
    Ending.CUT: Fault.CUT,
    Ending.HTTP_ERROR: Fault.HTTP_ERROR,
    Ending.TIMEOUT: Fault.TIMEOUT,
}


@dataclass(frozen=True)
class Tolerance:
    """How far a candidate's audio may lie from the baseline's.

    PCM is equal if no sample differs by more than `lsb` (int16 steps), or if the signal-to-noise ratio reaches `snr_db`
    where that is given. Durations may differ by `duration_s`. With `pcm` off only completeness and duration count.
    """

    lsb: int = 0
    snr_db: float | None = None
    duration_s: float = 0.0
    pcm: bool = True


@dataclass(frozen=True)
class Distance:
    """How far two PCM streams lie apart, over the samples that both have.

    `max_lsb` in int16 steps; `snr_db` is the energy of the first over the energy of the difference (infinite when
    equal); `first` is the first sample that differs by more than the tolerance, None if none does; `length` is the
    second's length minus the first's, in samples.
    """

    max_lsb: int
    snr_db: float
    first: int | None
    length: int

    def within(self, tolerance: Tolerance) -> bool:
        """Whether the shared samples are equal under `tolerance`; lengths are judged apart."""
        return self.first is None or (tolerance.snr_db is not None and self.snr_db >= tolerance.snr_db)


@dataclass(frozen=True)
class Verdict:
    """The judgement of one stream: what it was compared with, how far off it was, and the baseline's own noise."""

    status: Status
    fault: Fault
    message: str
    distance: Distance | None = None
    noise: Distance | None = None


def decode(record: StreamRecord) -> Pcm:
    """`[samples * channels]` int16 samples of a record, without a trailing half sample (`judge_stream` judges that)."""
    return np.frombuffer(record.pcm[: len(record.pcm) // 2 * 2], dtype="<i2").astype(np.int16, copy=False)


def measure(reference: Pcm, other: Pcm, tolerance: Tolerance) -> Distance:
    """Distance of `other` from `reference`, both `[samples]`, over the samples that both have."""
    shared = min(len(reference), len(other))
    signal = reference[:shared].astype(np.int64)
    error = other[:shared].astype(np.int64) - signal
    beyond = np.flatnonzero(np.abs(error) > tolerance.lsb)
    noise_energy = float(np.dot(error, error))
    signal_energy = float(np.dot(signal, signal))
    if noise_energy == 0.0:
        snr = math.inf
    else:
        snr = 10.0 * math.log10(signal_energy / noise_energy) if signal_energy > 0.0 else -math.inf
    return Distance(
        max_lsb=int(np.abs(error).max(initial=0)),
        snr_db=snr,
        first=int(beyond[0]) if beyond.size else None,
        length=len(other) - len(reference),
    )


def judge_stream(
    index: int,
    baseline_runs: Sequence[Sequence[StreamRecord]],
    candidate: StreamRecord,
    tolerance: Tolerance,
) -> Verdict:
    """Judge stream `index` of one candidate run against every baseline run of the same transition.

    `baseline_runs[run][stream]` holds every stream of the transition: the other streams are needed to recognise audio
    that was delivered to the wrong client. A stream whose client left is judged on the samples it received.
    """
    baselines = [run[index] for run in baseline_runs]
    for record in baselines:
        broken = _broken(record)
        if broken:
            return Verdict(Status.FAIL, Fault.BASELINE_BROKEN, f"the baseline itself: {broken[0].value}: {broken[1]}")
    odd = next((record for record in baselines if _formats_differ(record, baselines[0])), None)
    if odd is not None and _broken(candidate) is None:
        message = f"the baseline's own runs send {_format_text(baselines[0])} and {_format_text(odd)}"
        return Verdict(Status.INCONCLUSIVE, Fault.NOISE, message)
    for record in baselines if odd is None else ():
        if _formats_differ(candidate, record):
            message = f"{_format_text(candidate)} where the baseline sends {_format_text(record)}"
            return Verdict(Status.FAIL, Fault.FORMAT, message)
    broken = _broken(candidate)
    if broken:
        fault, message = broken
        swapped = _swapped(index, baseline_runs, candidate, tolerance, 0)
        return Verdict(Status.FAIL, fault, f"{message}; it {swapped}" if swapped else message)
    return _judge_audio(index, baseline_runs, candidate, tolerance)


def _judge_audio(
    index: int,
    baseline_runs: Sequence[Sequence[StreamRecord]],
    candidate: StreamRecord,
    tolerance: Tolerance,
) -> Verdict:
    audio = decode(candidate)
    per_second = _samples_per_second(candidate)
    allowed_length = round(tolerance.duration_s * per_second)
    noise = noise_floor(index, baseline_runs, tolerance)

    comparisons = []
    for record in (run[index] for run in baseline_runs):
        distance = measure(decode(record), audio, tolerance)
        missing = _length_error(record, candidate, distance.length) > allowed_length
        differs = tolerance.pcm and not distance.within(tolerance)
        comparisons.append((missing or differs, missing, abs(distance.length), distance.max_lsb, distance))
    wrong, wrong_length, _, _, nearest = min(comparisons, key=lambda item: item[:4])
    if not wrong:
        return Verdict(Status.OK, Fault.NONE, "", nearest, noise)

    if tolerance.pcm and nearest.first is not None:
        swapped = _swapped(index, baseline_runs, candidate, tolerance, nearest.first)
        if swapped:
            return Verdict(Status.FAIL, Fault.SWAPPED, swapped, nearest, noise)
    if wrong_length:
        return _judge_length(len(audio), nearest, noise, tolerance, per_second)
    return _judge_pcm(nearest, noise, per_second)


def _length_error(baseline: StreamRecord, candidate: StreamRecord, difference: int) -> int:
    """By how many samples the candidate's length is wrong, given that a client that left may have had any part."""
    if candidate.ending is Ending.CANCELLED:
        return 0 if baseline.ending is Ending.CANCELLED else max(0, difference)
    return max(0, -difference) if baseline.ending is Ending.CANCELLED else abs(difference)


def _judge_length(
    samples: int, nearest: Distance, noise: Distance | None, tolerance: Tolerance, per_second: float
) -> Verdict:
    want = (samples - nearest.length) / per_second
    lengths = (
        f"{samples / per_second:.3f} s of audio where the baseline sends {want:.3f} s ({nearest.length:+d} samples)"
    )
    if noise is not None and 0 < abs(nearest.length) <= NOISE_MARGIN * abs(noise.length):
        message = f"the baseline's own runs differ by {abs(noise.length)} samples; the candidate: {lengths}"
        return Verdict(Status.INCONCLUSIVE, Fault.NOISE, message, nearest, noise)
    is_prefix = nearest.length < 0 and nearest.within(tolerance)
    return Verdict(Status.FAIL, Fault.TRUNCATED if is_prefix else Fault.LENGTH, lengths, nearest, noise)


def _judge_pcm(nearest: Distance, noise: Distance | None, per_second: float) -> Verdict:
    where = f"{describe(nearest)}, from {(nearest.first or 0) / per_second:.3f} s on"
    if noise is None:
        return Verdict(Status.FAIL, Fault.PCM, where, nearest)
    if nearest.max_lsb <= NOISE_MARGIN * noise.max_lsb:
        message = f"the baseline's own runs are apart by {describe(noise)}; the candidate: {where}"
        return Verdict(Status.INCONCLUSIVE, Fault.NOISE, message, nearest, noise)
    return Verdict(Status.FAIL, Fault.PCM, f"{where} (the baseline's own runs: {describe(noise)})", nearest, noise)


def noise_floor(index: int, baseline_runs: Sequence[Sequence[StreamRecord]], tolerance: Tolerance) -> Distance | None:
    """How far the baseline's own runs of stream `index` lie apart at most; None with fewer than two runs.

    Where a client left, the runs may end anywhere: only the samples that they share count.
    """
    runs = [run[index] for run in baseline_runs]
    distances = []
    for position, first in enumerate(runs):
        for second in runs[position + 1 :]:
            distance = measure(decode(first), decode(second), tolerance)
            if Ending.CANCELLED in (first.ending, second.ending):
                distance = replace(distance, length=0)
            distances.append(distance)
    return max(distances, key=lambda item: (abs(item.length), item.max_lsb), default=None)


def _broken(record: StreamRecord) -> tuple[Fault, str] | None:
    fault = _ENDING_FAULTS.get(record.ending)
    if fault is not None:
        return fault, record.detail
    if not record.pcm:
        return Fault.NO_AUDIO, "the stream ended properly without a single sample"
    # A client that leaves may leave between the two bytes of a sample.
    if len(record.pcm) % 2 and record.ending is not Ending.CANCELLED:
        return Fault.MALFORMED, f"{len(record.pcm)} bytes are not whole 16-bit samples"
    return None


def _swapped(
    index: int,
    baseline_runs: Sequence[Sequence[StreamRecord]],
    candidate: StreamRecord,
    tolerance: Tolerance,
    first: int,
) -> str:
    """Says whose audio this stream carries from sample `first` on, or returns an empty text if nobody else's."""
    tail = decode(candidate)[first:]
    if not np.any(tail):
        return ""
    own_runs = [decode(run[index])[first:] for run in baseline_runs]
    for other in range(len(baseline_runs[0])):
        if other == index:
            continue
        alike = _widened(tolerance, noise_floor(other, baseline_runs, tolerance))
        for own, run in zip(own_runs, baseline_runs, strict=True):
            theirs = decode(run[other])[first:]
            shared = min(len(tail), len(theirs))
            if shared < MIN_SWAP_SAMPLES or not measure(theirs, tail, alike).within(alike):
                continue
            if len(own) < MIN_SWAP_SAMPLES or not measure(own, tail, alike).within(alike):
                since = f" from {first / _samples_per_second(candidate):.3f} s on" if first else ""
                return f"carries the audio of the baseline's stream {other}{since}"
    return ""


def _widened(tolerance: Tolerance, noise: Distance | None) -> Tolerance:
    """The tolerance, or the noise floor where that is wider yet still small beside the signal."""
    if noise is None or noise.snr_db < MIN_SWAP_SNR_DB:
        return tolerance
    return replace(tolerance, lsb=max(tolerance.lsb, math.ceil(NOISE_MARGIN * noise.max_lsb)))


def _samples_per_second(record: StreamRecord) -> float:
    return float((record.sample_rate or DEFAULT_SAMPLE_RATE) * (record.channels or 1))


def describe(distance: Distance) -> str:
    """A distance in words, without where it begins."""
    length = f", {distance.length:+d} samples" if distance.length else ""
    return f"up to {distance.max_lsb} LSB, SNR {distance.snr_db:.1f} dB{length}"


def _format(record: StreamRecord) -> tuple[int | None, int | None]:
    return record.sample_rate, record.channels


def _formats_differ(first: StreamRecord, second: StreamRecord) -> bool:
    """Whether two streams state different formats; what one leaves unstated is not held against it."""
    pairs = zip(_format(first), _format(second), strict=True)
    return any(ours and theirs and ours != theirs for ours, theirs in pairs)


def _format_text(record: StreamRecord) -> str:
    return f"{record.sample_rate or 'unstated'} Hz x {record.channels or 'unstated'} channels"
