# SPDX-License-Identifier: Apache-2.0
"""Cold references of one step: their initial CFM solved as one batch.

Why: a reference that the setup cache does not hold costs one CFM solve over its
whole length, and the cache holds one reference unless told otherwise. Eight new
voices in one step are eight solves: 692 ms on 0.30.0 and 176 ms on 0.32.0rc1
(one H200, full-size weights), of which a stacked solve needs about half or less.

What: when the stage starts to decode, the wrapper of ``_iter_decode_batches``
looks through the step's buckets for references whose streams begin, lets the
host prepare each one's features as it would a moment later, and asks the host's
``setup_batch`` which of them its cache holds. The first one that it does not
hold is then solved together with the others of the same shape, inside the
host's own ``setup_batch`` call (on NPU that call carries the attention backend),
by the host's own ``_create_initial_states`` over stacked features. The states of
the others wait in the step until the host asks for them, reference by reference
and in its order, so that the cache is filled by the host alone.

Three things stay as they are for one reference: feature extraction; the encoder,
which runs on one row at a time; and the speaker projection. Only the CFM solve
sees several rows.

When a grouped solve is not to be had (the graph budget is full, graphs have been
disabled, memory has run out) the host solves each reference by itself, with the
encoding that was made for the group. A reference that fails does so in its own
turn, with the host's error.

Where: 0.32.0rc1 on its fused whole-solve graphs without frame padding, 0.30.0
with or without its per-step graphs. TensorRT and every other execution policy
keep the solve of one reference.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from omni_speech_accel.items import _reference_groups as groups
from omni_speech_accel.items._prompt_encoder import PromptEncoder
from omni_speech_accel.plugin.options import ColdReferenceOptions
from omni_speech_accel.plugin.session import Item

KEY = "cold_reference_batch"

Cold: TypeAlias = Item[ColdReferenceOptions]

Encoding = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states ``[1, F, 80]``, convolution cache and attention cache of one encoded reference."""


class _Cold(Exception):
    """The setup cache does not hold the reference that was asked for."""


class _Warmed(Exception):
    """The solve that was only run for its graphs is done."""


class Refused(Exception):
    """The host's graphs do not take the grouped solve."""


@dataclass
class _Step:
    """The references of the step that is running, by cache key. A stage runs its steps on one thread."""

    asking: bool = False
    warming: bool = False
    # Cold references in the order in which the host will ask for them, and how often it will.
    cold: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    uses: Counter[Hashable] = field(default_factory=Counter)
    states: dict[Hashable, Any] = field(default_factory=dict)
    encodings: dict[Hashable, Encoding] = field(default_factory=dict)
    # The references whose initial states are being made now, row by row.
    solving: tuple[Any, ...] = ()

    def clear(self) -> None:
        """Forget the step."""
        self.asking = self.warming = False
        self.solving = ()
        for table in (self.cold, self.uses, self.states, self.encodings):
            table.clear()


def _step(item: Cold) -> _Step:
    return item.state(_Step)


def forward(item: Cold, wrapped: Any, stage: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Bound the life of what a step keeps, however the step ends: a reference's state is 0.4 GiB."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        forget(item)


def forget(item: Cold) -> None:
    """Drop what the stage's step keeps."""
    _step(item).clear()


def warm(item: Cold, backend: Any, features: Any, size: int) -> None:
    """Solve one reference as a group of ``size``, for the graphs that this captures; nothing is kept.

    Raises:
        Refused: The host's whole-solve graphs turned the group down.
        Exception: What the host raised.
    """
    _step(item).warming = True
    try:
        # By way of the host's setup_batch, which on NPU selects the attention backend.
        backend.setup_batch(groups.stack([features] * size), size)
    except _Warmed:
        pass
    finally:
        forget(item)


def iter_decode_batches(item: Cold, wrapped: Any, stage: Any, /, buckets: Iterable[list[Any]]) -> Iterable[list[Any]]:
    """Note the step's cold references before the stage decodes its first bucket."""
    return _with_plan(item, wrapped, stage, [list(bucket) for bucket in buckets])


def _with_plan(item: Cold, wrapped: Any, stage: Any, buckets: list[list[Any]]) -> Iterator[list[Any]]:
    step = _step(item)
    step.clear()
    item.state(groups.BackOff, "back-off").next_step()
    if stage.backend is not None:
        _plan(step, stage, buckets)
    yield from wrapped(buckets)


def _plan(step: _Step, stage: Any, buckets: list[list[Any]]) -> None:
    backend = stage.backend
    starting: dict[tuple[str, str], int] = {}
    for bucket in buckets:
        fresh = [item for item in bucket if item.previous is None]
        if fresh:
            reference = (fresh[0].prompt_cache_id, fresh[0].prompt_wav)
            step.uses[reference] += 1
            starting.setdefault(reference, len(fresh))
    if len(starting) < 2 or not supported(backend):
        step.uses.clear()
        return
    if getattr(stage, "_initial_batch_size", 0):
        step.uses = Counter(dict.fromkeys(starting, sys.maxsize))  # a bucket is cut into waves, each sets up anew
    for reference, rows in starting.items():
        try:
            features = backend.prepare_prompt(*reference)
        except Exception:
            continue  # The host meets the same error in this reference's own turn, and words it.
        step.asking = True
        try:
            step.states[reference] = backend.setup_batch(features, rows)[0]
        except _Cold:
            step.cold[reference] = features
        finally:
            step.asking = False


def policy_problem(backend: Any) -> str:
    """Why the item has nothing to do on a backend of this execution policy, or ``""``."""
    if supported(backend):
        return ""
    return "this stage does not solve by the host's whole-solve graphs, where grouping is proven; references stay alone"


def supported(backend: Any) -> bool:
    """Whether the host's execution policy is one whose solve of several references equals the solves of each."""
    if backend._trt_stepper is not None:
        return False
    if not hasattr(backend, "_whole_euler_active"):
        return True
    return bool(groups.whole_solve_graphs(backend) and backend._ragged_fused_body and not backend.float16)


def solve_together(item: Cold, backend: Any, features: Any) -> int:
    """How many references shaped like ``features`` one grouped solve may hold; 1: none but it."""
    options = item.options
    frames = int(features.mels.shape[1])
    bucket = int(backend._cfm_graph_bucket_frames)
    graphs = getattr(backend, "_whole_euler_graph_wrapper", None)
    bounds = [options.max_batch]
    if graphs is not None:
        if bucket > 1 and frames % bucket:
            return 1  # The padding frames would share the solve; it has been shown equal without any.
        bounds += [graphs.micro_batch_size, graphs.max_graph_batch]
    budget = groups.memory_budget(features.mels.device, options.max_memory_mib)
    bounds.append(None if budget is None else budget // max(1, transient_bytes_per_reference(backend, frames)))
    limit = max(1, min((bound for bound in bounds if bound is not None), default=sys.maxsize))
    return groups.largest_power_of_two(limit) if groups.graph_per_batch_size(backend) else limit


def transient_bytes_per_reference(backend: Any, frames: int) -> int:
    """Device bytes that each reference adds to the peak of a grouped solve.

    Two attention caches over all Euler steps, the stacked one and the copy that the reference keeps, and six of one
    step: what the estimator reads and writes, and the graph's static copies of it.
    """
    kept, step = groups.attention_cache_bytes(backend, frames)
    return 2 * kept + 6 * step


def create_initial_states(item: Cold, wrapped: Any, backend: Any, /, features: Any, batch_size: int) -> list[Any]:
    """Initial states of a reference that the setup cache does not hold, solved with its companions of the step.

    Raises:
        Refused: ``features`` are stacked, and the host's whole-solve graphs turned the batch down.
    """
    step = _step(item)
    if step.asking:
        raise _Cold
    rows = groups.rows_of(features)
    if rows is not None:
        states = _make_states(step, wrapped, features, len(rows), encode=rows)
        if step.warming:
            raise _Warmed
        return states
    key = features.cache_key
    if step.cold.get(key) is features:
        _solve(item, wrapped, backend, features)
    state = step.states.get(key)
    if state is None:
        encoded = (features,) * batch_size if key in step.encodings else ()
        own = _make_states(step, wrapped, features, batch_size, encode=encoded)
        step.encodings.pop(key, None)
        return own
    step.uses[key] -= 1
    if step.uses[key] <= 0:
        del step.states[key]
    item.counters.inc("served")
    # The host only ever reads an initial state, and 0.32 shares one among a reference's rows itself.
    return [state] * batch_size


def _make_states(
    step: _Step, wrapped: Any, features: Any, batch_size: int, *, encode: tuple[Any, ...] = ()
) -> list[Any]:
    """The host's initial states, each in storage of its own. ``encode``: rows that this item encodes, or has."""
    step.solving = encode
    try:
        states: list[Any] = wrapped(features, batch_size)
    finally:
        step.solving = ()
    return states


def _solve(item: Cold, wrapped: Any, backend: Any, first: Any) -> None:
    """Solve ``first`` and its companions; they leave ``cold`` either way, and enter ``states`` on success."""
    step, counters, back_off = _step(item), item.counters, item.state(groups.BackOff, "back-off")
    shape = groups.signature(first)
    alike = [features for features in step.cold.values() if groups.signature(features) == shape]
    members = alike[alike.index(first) :]
    if len(members) > 1:
        members = members[: min(back_off.rows, solve_together(item, backend, first))]
    if groups.graph_per_batch_size(backend):
        members = members[: groups.largest_power_of_two(len(members))]
    while len(members) > 1:
        try:
            states = _make_states(step, wrapped, groups.stack(members), len(members), encode=tuple(members))
        except Refused:
            counters.inc("refused", len(members))
        except Exception as error:
            counters.inc("failures")
            back_off.failed(error, "cold references failed as one batch; solving fewer at once", len(members))
            if groups.out_of_memory(error):
                members = list(groups.halves(members)[0])
                continue
        else:
            counters.inc("groups")
            counters.inc("references", len(members))
            step.states.update((features.cache_key, state) for features, state in zip(members, states, strict=True))
            for features in members:
                step.encodings.pop(features.cache_key, None)
        break
    for features in members:
        step.cold.pop(features.cache_key, None)


def encode_chunk(item: Cold, wrapped: Any, backend: Any, /, tokens: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    """Encode the references of a group one row at a time, and each of them once in a step."""
    step = _step(item)
    if not step.solving:
        return wrapped(tokens, *rest, **kwargs)
    missing = [row for row, features in enumerate(step.solving) if features.cache_key not in step.encodings]
    encoder = item.state(lambda: PromptEncoder(tokens.device, item.counters, item.options.encoder_graphs), "encoder")
    encoded = encoder.encode(
        backend, lambda row: wrapped(row, *rest, **kwargs), [tokens[row : row + 1] for row in missing]
    )
    for row, encoding in zip(missing, encoded, strict=True):
        step.encodings[step.solving[row].cache_key] = encoding
    hidden, convolution, attention = zip(*(step.encodings[row.cache_key] for row in step.solving), strict=True)
    return torch.cat(hidden), torch.cat(convolution), torch.cat(attention, dim=1)


def decode_cfm(
    item: Cold, wrapped: Any, backend: Any, /, mu: torch.Tensor, speakers: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    """Solve a group as one batch, with each reference's own speaker projection, or not at all."""
    members = _step(item).solving
    if len(members) < 2:
        return wrapped(mu, speakers, *rest, **kwargs)
    speakers = groups.project_speakers(backend, members)
    graphs = getattr(backend, "_whole_euler_graph_wrapper", None)
    with nullcontext() if graphs is None else _refusal_raises(graphs):
        return wrapped(mu, speakers, *rest, **kwargs)


@contextmanager
def _refusal_raises(graphs: Any) -> Iterator[None]:
    """Raise where the host's wrapper turns a batch down.

    It answers None and the host goes on with an unfused eager solve of the whole batch, whose results are another
    policy's, and which is slower than one graph replay per reference.
    """
    replay = graphs.replay

    def or_raise(*args: Any, **kwargs: Any) -> Any:
        result = replay(*args, **kwargs)
        if result is None:
            raise Refused
        return result

    graphs.replay = or_raise
    try:
        yield
    finally:
        del graphs.replay
