# SPDX-License-Identifier: Apache-2.0
"""Rows of different references in one decode batch.

Why: the stage buckets a decode batch by reference first, so eight voices at
once are eight batches of one: 653 ms for a chunk that takes 143 ms as one batch
on 0.30.0, and 170 ms against 56 ms on 0.32.0rc1 (one H200, full-size weights).

What: the stage hands its buckets to ``_iter_decode_batches``, whose result it
decodes one by one. The wrapper there joins buckets that differ in nothing but
the reference: same cache shapes, token count, last-chunk flag, epoch and prompt
length. For a joined bucket the stage's next call, ``prepare_prompt``, returns
stacked features (:mod:`omni_speech_accel.items._reference_groups`), and the
host's own ``decode_batch`` does the rest. A fresh row gets its initial state
from the host's ``setup_batch`` of its own reference beforehand, so stacked
features never meet the setup cache.

A bucket that finds no partner passes through untouched, and with it all traffic
of one reference. Buckets that the host decodes raggedly, mixes fresh and running
streams in, or cuts into configured waves stay the host's.

What may go wrong: a failing joined call is repeated in the host's own batches,
so that the error that surfaces names the requests that stock would name; out
of memory, it is repeated in halves first. After a whole-solve graph has replayed,
the streams' caches have moved on and the failure is passed on as it is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch

from omni_speech_accel.items import _reference_groups as groups
from omni_speech_accel.plugin.options import CrossReferenceOptions
from omni_speech_accel.plugin.session import Item
from omni_speech_accel.plugin.table import CODE2WAV_MODULE

KEY = "cross_reference_decode"
BATCH_ERROR = "MiniCPMO45Code2WavBatchError "
"""How the stage recognises an error that is ready for the client (``_batch_error`` in its module)."""

Crossing: TypeAlias = Item[CrossReferenceOptions]


@dataclass
class _Step:
    """What the wrappers of one stage tell each other within a step. A stage runs its steps on one thread."""

    # Stacked features of the joined bucket that the stage has just been handed, and the reference that it will ask
    # for: taken by the next ``prepare_prompt``, which is the first thing that the stage does with a bucket.
    offer: tuple[tuple[str, str], Any] | None = None
    # The references behind the rows that are being decoded.
    decoding: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class _Candidate:
    """One of the stage's buckets, and what it must share with another to join it."""

    items: list[Any]
    features: Any = None
    key: Hashable = None
    broken: bool = False


def _step(item: Crossing) -> _Step:
    return item.state(_Step)


def iter_decode_batches(
    item: Crossing, wrapped: Any, stage: Any, /, buckets: Iterable[list[Any]]
) -> Iterable[list[Any]]:
    """Join the stage's buckets over references."""
    batches = wrapped(buckets)
    if stage.backend is None or bool(getattr(stage, "_initial_batch_size", 0)):
        # code2wav_initial_batch_size cuts a reference's first chunks into waves of a size that the operator chose.
        return batches  # type: ignore[no-any-return]
    return _joined(item, stage, batches)


def _joined(item: Crossing, stage: Any, batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
    batches = [list(items) for items in batches]
    if len(batches) < 2:
        yield from batches
        return
    step, counters = _step(item), item.counters
    candidates = [_candidate(stage, items) for items in batches]
    if any(candidate.broken for candidate in candidates):
        # The step will fail; in the host's own order it fails with the first of its errors.
        yield from batches
        return
    together: dict[Hashable, list[_Candidate]] = {}
    for index, candidate in enumerate(candidates):
        together.setdefault(("alone", index) if candidate.key is None else candidate.key, []).append(candidate)
    back_off = item.state(groups.BackOff, "back-off")
    back_off.next_step()
    for group in together.values():
        for part in _bounded(stage.backend, item.options, group, back_off.rows):
            rows = _with_states(stage, part) if len(part) > 1 else None
            if rows is None:
                yield from (candidate.items for candidate in part)
                continue
            features = groups.stack(
                [candidate.features for candidate in part for _ in candidate.items],
                [tuple(item.request_id for item in candidate.items) for candidate in part],
            )
            counters.inc("batches")
            counters.inc("rows", len(rows))
            step.offer = (rows[0].prompt_cache_id, rows[0].prompt_wav), features
            try:
                yield rows
            finally:
                step.offer = None


def _candidate(stage: Any, items: list[Any]) -> _Candidate:
    """``items`` with the key that makes it joinable; without one where the host must decode it by itself."""
    first = items[0]
    fresh = first.previous is None
    uniform = all(
        (item.previous is None) == fresh
        and item.tokens.numel() == first.tokens.numel()
        and item.last_chunk == first.last_chunk
        and item.cache_epoch == first.cache_epoch
        and (item.prompt_cache_id, item.prompt_wav) == (first.prompt_cache_id, first.prompt_wav)
        for item in items
    )
    if not uniform:
        return _Candidate(items)
    shapes: set[Hashable] = {_state_signature(item.previous.token2wav) for item in items if not fresh}
    if len(shapes) > 1:
        return _Candidate(items)
    try:
        features = stage.backend.prepare_prompt(first.prompt_cache_id, first.prompt_wav)
    except Exception:
        return _Candidate(items, broken=True)  # The host meets the same error in this bucket's turn, and words it.
    # The host keeps turns apart unless told otherwise (cfm_cross_turn_buckets); so does a joined bucket.
    epoch = None if getattr(stage, "_cross_turn_buckets", False) is True else first.cache_epoch
    key = (
        fresh,
        first.tokens.numel(),
        first.tokens.device,
        first.last_chunk,
        epoch,
        shapes.pop() if shapes else None,
        groups.signature(features),
    )
    return _Candidate(items, features, key)


def _state_signature(state: Any) -> Hashable:
    """Shapes, dtypes and devices of a stream's caches (``[names, ...]`` of its flow and vocoder)."""
    return tuple(
        (name, tuple(value.shape), value.dtype, value.device)
        for caches in (state.flow_cache, state.hift_cache)
        for name, value in sorted(caches.items())
    )


def _bounded(
    backend: Any, options: CrossReferenceOptions, candidates: list[_Candidate], most: int
) -> Iterator[list[_Candidate]]:
    """``candidates`` in parts that one call may hold. A bucket of the host is never cut."""
    if len(candidates) == 1:
        yield candidates
        return
    bound = min(most, max_rows(backend, options, candidates[0]))
    few_sizes = groups.graph_per_batch_size(backend)
    left = sum(len(candidate.items) for candidate in candidates)
    part: list[_Candidate] = []
    rows = limit = 0
    for candidate in candidates:
        if not part or rows + len(candidate.items) > limit:
            if part:
                yield part
            left -= rows
            limit = min(bound, left)
            if few_sizes:
                limit = groups.largest_power_of_two(limit)
            part, rows = [], 0
        part.append(candidate)
        rows += len(candidate.items)
    yield part


def max_rows(backend: Any, options: CrossReferenceOptions, candidate: _Candidate) -> int:
    """Rows of one joined call: the configured cap, the host's largest graphed batch, and what memory allows."""
    bounds = [options.max_batch]
    if groups.whole_solve_graphs(backend):
        # Above it a replay is refused, and the eager solve stacks every row's cache. Up to it the caches stay per
        # request, as when the host decodes the rows one by one: no transient memory grows with the rows.
        bounds.append(backend._whole_euler_graph_wrapper.max_graph_batch)
    else:
        budget = groups.memory_budget(candidate.features.mels.device, options.max_memory_mib)
        bounds.append(None if budget is None else budget // max(1, transient_bytes_per_row(backend, candidate)))
    return max(1, min((bound for bound in bounds if bound is not None), default=sys.maxsize))


def transient_bytes_per_row(backend: Any, candidate: _Candidate) -> int:
    """Device bytes that a row of a joined, stacked decode holds beyond its own stream state.

    Three attention caches over all Euler steps: the rows' old ones stacked, the new stacked one, and the copy that
    is split off it; and six of one step: what the estimator reads and writes, and the graph's static copies of it.
    """
    width = 2 * int(candidate.items[0].tokens.numel())
    previous = candidate.items[0].previous
    if previous is None:
        cached = int(candidate.features.mels.shape[1])
    else:
        cached = int(previous.token2wav.flow_cache["estimator_att_cache"].shape[4])
    kept, step = groups.attention_cache_bytes(backend, cached + width)
    return 3 * kept + 6 * step


def _with_states(stage: Any, part: list[_Candidate]) -> list[Any] | None:
    """The rows of ``part``, fresh ones with their initial state; ``None`` where the host must set one up itself."""
    if part[0].items[0].previous is not None:
        return [item for candidate in part for item in candidate.items]
    request_state = import_module(CODE2WAV_MODULE)._RequestState
    rows: list[Any] = []
    for candidate in part:
        try:
            states = stage.backend.setup_batch(candidate.features, len(candidate.items))
        except Exception:
            return None  # Its own bucket raises it again, in its turn and with its requests.
        rows.extend(
            dataclasses.replace(
                item,
                previous=request_state(
                    cache_epoch=item.cache_epoch,
                    chunk_seq=item.chunk_seq,
                    prompt_cache_id=item.prompt_cache_id,
                    prompt_wav=item.prompt_wav,
                    token2wav=state,
                ),
            )
            for item, state in zip(candidate.items, states, strict=True)
        )
    if len({_state_signature(row.previous.token2wav) for row in rows}) > 1:
        return None
    return rows


def prepare_prompt(item: Crossing, wrapped: Any, backend: Any, /, prompt_cache_id: str, prompt_wav: str) -> Any:
    """The stacked features of the joined bucket that the stage has just been handed; the host's own otherwise."""
    step = _step(item)
    offer, step.offer = step.offer, None
    if offer is None or offer[0] != (prompt_cache_id, prompt_wav):
        return wrapped(prompt_cache_id, prompt_wav)
    return offer[1]


def decode_batch(
    item: Crossing,
    wrapped: Any,
    backend: Any,
    /,
    tokens: torch.Tensor,
    features: Any,
    states: list[Any],
    **options: Any,
) -> Any:
    """Decode a joined bucket; where that fails, decode it as the host's own batches.

    Raises:
        RuntimeError: A bucket of the host fails by itself: its error, as the stage words it for that bucket.
    """
    references = groups.rows_of(features)
    if references is None:
        return wrapped(tokens, features, states, **options)
    call = _JoinedCall(item, wrapped, backend, tokens, references, states, options, groups.requests_of(features))
    return call.run(features, range(len(references)))


@dataclass
class _JoinedCall:
    item: Crossing
    wrapped: Any
    backend: Any
    tokens: torch.Tensor
    references: tuple[Any, ...]
    states: list[Any]
    options: dict[str, Any]
    requests: tuple[tuple[str, ...], ...]

    def run(self, features: Any, rows: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Audio and next state of ``rows``, in row order."""
        mark = groups.replays(self.backend)
        try:
            return self._decode(features, rows)
        except Exception as error:
            if groups.replays(self.backend) != mark:
                raise
            failure = error
        self.item.counters.inc("failures")
        what = "rows of different references failed as one batch; decoding them apart"
        self.item.state(groups.BackOff, "back-off").failed(failure, what, len(rows))
        own = self._own_batches(rows)
        if groups.out_of_memory(failure) and len(own) > 2:
            del failure
            parts = [[row for batch in half for row in own[batch]] for half in groups.halves(range(len(own)))]
            results = [self.run(groups.stack([self.references[row] for row in part]), part) for part in parts]
        else:
            results = [self._alone(batch) for batch in own]
        return [audio for audios, _ in results for audio in audios], [
            state for _, states in results for state in states
        ]

    def _decode(self, features: Any, rows: Sequence[int]) -> tuple[list[Any], list[Any]]:
        step = _step(self.item)
        tokens = self.tokens if len(rows) == len(self.references) else self.tokens[rows[0] : rows[-1] + 1]
        step.decoding = groups.rows_of(features)
        try:
            result: tuple[list[Any], list[Any]] = self.wrapped(
                tokens, features, [self.states[row] for row in rows], **self.options
            )
        finally:
            step.decoding = None
        return result

    def _own_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """``rows`` by the bucket of the host that they came from."""
        start, batches = 0, []
        for requests in self.requests:
            batch = [row for row in range(start, start + len(requests)) if row in rows]
            start += len(requests)
            if batch:
                batches.append(batch)
        return batches

    def _alone(self, rows: list[int]) -> tuple[list[Any], list[Any]]:
        try:
            return self._decode(self.references[rows[0]], rows)
        except Exception as error:
            if isinstance(error, RuntimeError) and str(error).startswith(BATCH_ERROR):
                raise
            ids = [request for requests in self.requests for request in requests]
            raise import_module(CODE2WAV_MODULE)._batch_error(
                "backend_unsupported_or_failed",
                request_ids=[ids[row] for row in rows],
                error_type=type(error).__name__,
                error=str(error),
            ) from error


def decode_cfm(
    item: Crossing, wrapped: Any, backend: Any, /, mu: torch.Tensor, speakers: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    """Give a joined solve the speakers as each reference alone projects them."""
    references = _step(item).decoding
    if references is not None:
        speakers = groups.project_speakers(backend, references)
    return wrapped(mu, speakers, *rest, **kwargs)
