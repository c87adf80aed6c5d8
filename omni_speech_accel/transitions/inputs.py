# SPDX-License-Identifier: Apache-2.0
"""The texts that the streams speak: a built-in English set, or the user's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_speech_accel.transitions import CannotCompare

# Two lengths on purpose: an early finish needs streams that end while others are far from done.
_SHORT_TEXTS = (
    "Good morning, everyone.",
    "The kettle is boiling.",
    "Please close the gate.",
    "That seat is taken.",
    "We leave at seven.",
    "Turn left at the bridge.",
    "The parcel arrived today.",
    "Nobody saw the comet.",
    "Her brother plays chess.",
    "It rained all weekend.",
    "Lunch is on the table.",
    "The lights went out.",
)
_LONG_TEXTS = (
    "The harbour master kept a ledger of every vessel that came in before dawn, and by the end of the winter the "
    "pages held four hundred names, two storms and one apology.",
    "When the orchestra had finished tuning, the conductor put down her baton, turned to the audience and explained "
    "why the second movement would be played without any lights at all.",
    "A careful gardener waters in the evening, turns the soil after the first frost, and never plants tomatoes in "
    "the same bed two years running, however good the harvest was.",
    "The train to the coast runs twice a day in summer, stopping at every village along the river, and the guard "
    "will wait for anyone he can see hurrying across the fields.",
    "Engineers measured the bridge for a month before they agreed that the sway was harmless, that the bolts were "
    "sound, and that the noise people complained about was only the wind.",
    "My grandmother wrote her recipes on the backs of old envelopes, so that each pudding in the family still "
    "carries the postmark of a town that none of us has ever visited.",
    "The library opens late on Thursdays because the caretaker also drives the school bus, and nobody in the valley "
    "has ever suggested that one of the two jobs should go to someone else.",
    "After the third attempt the climbers turned back, left most of their rope on the ledge, and walked down "
    "through the forest talking about nothing but soup and dry socks.",
    "The museum bought the clock for almost nothing, since it had not run in a century, and then spent eleven years "
    "finding out that a single pin had been put in backwards.",
    "Every spring the council repaints the crossing in front of the bakery, and every autumn the lorries that bring "
    "the flour have worn it away again down to the grey stone.",
    "She learned the language from radio plays, which is why she still greets shopkeepers like a detective and says "
    "goodbye like someone about to board a ship in heavy fog.",
    "The survey counted otters along nine kilometres of the river, found them in seven, and recommended that the "
    "other two be left alone until the willows had grown back.",
)

# Early finishes need streams of clearly different lengths; below this ratio the short one may not end first.
MIN_LENGTH_RATIO = 2.0


@dataclass(frozen=True)
class SpeechInput:
    """One text, with the request fields that belong to it alone (its reference, voice, ...)."""

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InputPool:
    """Inputs in two groups: ``short`` ones end early, ``long`` ones outlive them."""

    short: tuple[SpeechInput, ...]
    long: tuple[SpeechInput, ...]


def builtin_pool() -> InputPool:
    """The built-in English texts."""
    return InputPool(
        short=tuple(SpeechInput(text) for text in _SHORT_TEXTS),
        long=tuple(SpeechInput(text) for text in _LONG_TEXTS),
    )


def load_pool(path: Path) -> InputPool:
    """Read one input a line: plain text, or a JSON object that holds ``input`` and any further request fields.

    The shorter third becomes the short group. Raises `CannotCompare` when the file is unreadable, a line is malformed,
    there are fewer than two inputs, or the lengths do not differ enough for one stream to end before another.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotCompare(f"cannot read the inputs {path}: {error}") from error
    inputs = [_parse_line(line.strip(), f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    return split_by_length(inputs)


def split_by_length(inputs: list[SpeechInput]) -> InputPool:
    """Split inputs into the shorter third and the rest; raises `CannotCompare` as `load_pool` does."""
    if len(inputs) < 2:
        raise CannotCompare(f"at least two inputs are needed, one short and one long, got {len(inputs)}")
    ordered = sorted(inputs, key=lambda item: len(item.text))
    cut = max(1, len(ordered) // 3)
    pool = InputPool(short=tuple(ordered[:cut]), long=tuple(ordered[cut:]))
    longest_short, shortest_long = len(pool.short[-1].text), len(pool.long[0].text)
    if shortest_long < MIN_LENGTH_RATIO * longest_short:
        raise CannotCompare(
            f"the inputs are too alike in length: the shorter third reaches {longest_short} characters, the others "
            f"start at {shortest_long}; a stream that ends early needs the others at least "
            f"{MIN_LENGTH_RATIO:g} times as long"
        )
    return pool


def parse_json(text: str) -> Any:
    """The value of a JSON text that can be sent on: raises `ValueError` for NaN, infinities, lone surrogates, depth."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return value


def _parse_line(line: str, place: str) -> SpeechInput:
    if not line.startswith("{"):
        return SpeechInput(line)
    try:
        item = parse_json(line)
    except ValueError as error:
        raise CannotCompare(f"{place}: not a JSON object that can be sent: {error}") from error
    text = item.pop("input", None)
    if not isinstance(text, str) or not text.strip():
        raise CannotCompare(f"{place}: a JSON line needs a non-empty 'input' text")
    return SpeechInput(text, item)
