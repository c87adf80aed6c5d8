# SPDX-License-Identifier: Apache-2.0
"""Which streams start, stop and end when: patterns that move a server between batch shapes.

A captured decode graph pads the live rows up to a captured size, is left for a mixed step as soon as a prompt joins,
and is entered again with another set of rows. The faults live in those moves, so every pattern forces one kind of
move. Starts and cancels hang on what the other streams have received, never on the clock: a slow and a fast server go
through the same sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omni_speech_accel.transitions import CannotCompare
from omni_speech_accel.transitions.inputs import InputPool, SpeechInput


class State(str, Enum):
    """What a stream can have reached. Every stream that ends, for whatever reason, has reached both."""

    AUDIO = "audio"
    ENDED = "ended"


@dataclass(frozen=True)
class Condition:
    """Stream number `stream` of the same transition has reached `state`."""

    stream: int
    state: State = State.AUDIO


@dataclass(frozen=True)
class StreamSpec:
    """One streaming request: what it says, when it starts and when, if ever, its client goes away."""

    index: int
    role: str
    text: str
    fields: Mapping[str, Any]
    seed: int
    starts_after: tuple[Condition, ...] = ()
    cancels_after: tuple[Condition, ...] = ()

    @property
    def cancelled(self) -> bool:
        """Whether the plan takes this client away in mid-stream."""
        return bool(self.cancels_after)


@dataclass(frozen=True)
class Transition:
    """A named sequence of batch shapes and the streams that force it.

    `peak` is the number of streams that must be seen streaming at one moment for the sequence to have happened; with
    `strict` every join, early end and disconnect must also be seen to fall among other streams' audio.
    """

    name: str
    purpose: str
    streams: tuple[StreamSpec, ...]
    peak: int
    strict: bool = True


class _Builder:
    """Draws inputs and seeds for one transition, reproducibly and without repeating an input while others are left."""

    def __init__(self, pool: InputPool, seed: int, name: str) -> None:
        self.random = random.Random(f"{seed}/{name}")
        self._decks = {"short": self._deck(pool.short), "long": self._deck(pool.long)}
        self._drawn = {"short": 0, "long": 0}
        self._streams: list[StreamSpec] = []

    def _deck(self, inputs: Sequence[SpeechInput]) -> list[SpeechInput]:
        deck = list(inputs)
        self.random.shuffle(deck)
        return deck

    def add(
        self,
        role: str,
        length: str = "long",
        starts_after: Sequence[Condition] = (),
        cancels_after: Sequence[Condition] = (),
    ) -> int:
        deck = self._decks[length]
        item = deck[self._drawn[length] % len(deck)]
        self._drawn[length] += 1
        index = len(self._streams)
        seed = self.random.randrange(1 << 31)
        spec = StreamSpec(index, role, item.text, item.fields, seed, tuple(starts_after), tuple(cancels_after))
        self._streams.append(spec)
        return index

    def build(self, name: str, purpose: str, peak: int, strict: bool) -> Transition:
        return Transition(name, purpose, tuple(self._streams), peak, strict)


def _all_have_audio(streams: Sequence[int]) -> tuple[Condition, ...]:
    return tuple(Condition(stream) for stream in streams)


def _solo(build: _Builder, size: int) -> tuple[str, int]:
    build.add("alone")
    return "one stream alone: decode at batch 1, the point of comparison for the others", 1


def _padded(build: _Builder, size: int) -> tuple[str, int]:
    for _ in range(size):
        build.add("long")
    return f"{size} streams at once: a decode batch off the capture grid, padded to the next captured size", size


def _staggered(build: _Builder, size: int) -> tuple[str, int]:
    for index in range(size):
        build.add("long", starts_after=[Condition(index - 1)] if index else [])
    return f"{size} streams, each starting at the first audio of the one before: decode, mixed, decode, repeatedly", 2


def _early_finish(build: _Builder, size: int) -> tuple[str, int]:
    build.add("long")
    for _ in range(size - 1):
        build.add("short", "short")
    return f"{size - 1} short streams end while a long one goes on: the decode batch shrinks under replay", 1


def _cancel(build: _Builder, size: int) -> tuple[str, int]:
    everyone = _all_have_audio(range(size))
    for index in range(size):
        if index % 2:
            build.add("cancelled", cancels_after=everyone)
        else:
            build.add("long")
    return f"{size // 2} of {size} clients disconnect in mid-stream: rows leave the batch without finishing", size


def _late_join(build: _Builder, size: int) -> tuple[str, int]:
    for _ in range(size):
        build.add("long")
    build.add("joiner", starts_after=_all_have_audio(range(size)))
    return f"one stream joins {size} that are decoding: decode, mixed, decode", size + 1


def _slot_reuse(build: _Builder, size: int) -> tuple[str, int]:
    for _ in range(size - 1):
        build.add("long")
    leaver = build.add("cancelled", cancels_after=_all_have_audio(range(size)))
    build.add("joiner", starts_after=[Condition(leaver, State.ENDED)])
    return f"one of {size} clients disconnects and a new stream takes its row: no state may be left over", size


def _churn(build: _Builder, size: int) -> tuple[str, int]:
    live: list[int] = []
    for index in range(2 * size):
        role = build.random.choice(("long", "short", "cancelled")) if index >= 2 else "long"
        starts: list[Condition] = []
        if len(live) >= size:
            starts = [Condition(live.pop(build.random.randrange(len(live))), State.ENDED)]
        elif live and build.random.random() < 0.5:
            starts = [Condition(build.random.choice(live))]
        length = "short" if role == "short" else "long"
        live.append(build.add(role, length, starts, [Condition(index)] if role == "cancelled" else []))
    return f"{2 * size} streams with seeded random starts, lengths and disconnects, at most {size} at a time", 2


def _recovery(build: _Builder, size: int) -> tuple[str, int]:
    build.add("alone")
    return "one stream alone again: nothing of the earlier batches is left behind", 1


_Pattern = Callable[[_Builder, int], tuple[str, int]]

# Pattern name -> (builder, whether it is repeated for every size of the grid). The order is the order of the run.
PATTERNS: dict[str, tuple[_Pattern, bool]] = {
    "solo": (_solo, False),
    "padded": (_padded, True),
    "staggered": (_staggered, True),
    "early-finish": (_early_finish, True),
    "cancel": (_cancel, True),
    "late-join": (_late_join, True),
    "slot-reuse": (_slot_reuse, True),
    "churn": (_churn, True),
    "recovery": (_recovery, False),
}


def build_plan(pool: InputPool, sizes: Sequence[int], seed: int, only: Sequence[str] = ()) -> tuple[Transition, ...]:
    """The transitions to run, in order: every pattern (or those in `only`) at every size of the grid.

    The same pool, sizes and seed give the same plan. Raises `CannotCompare` for an unknown pattern or a size below 2.
    """
    unknown = [name for name in only if name not in PATTERNS]
    if unknown:
        raise CannotCompare(f"unknown transition {unknown[0]!r}; there are: {', '.join(PATTERNS)}")
    too_small = [size for size in sizes if size < 2]
    if too_small or not sizes:
        raise CannotCompare(
            f"a batch that changes needs at least 2 streams, got {too_small[0] if too_small else 'none'}"
        )
    plan: list[Transition] = []
    for pattern, (make, sized) in PATTERNS.items():
        if only and pattern not in only:
            continue
        for size in sizes if sized else (1,):
            name = f"{pattern}-{size}" if sized else pattern
            builder = _Builder(pool, seed, name)
            purpose, peak = make(builder, size)
            # Which of the random moves fall together is the seed's and the server's affair.
            plan.append(builder.build(name, purpose, peak, strict=pattern != "churn"))
    return tuple(plan)
