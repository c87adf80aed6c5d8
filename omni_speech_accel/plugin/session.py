# SPDX-License-Identifier: Apache-2.0
"""One stage model's view of the package: its settings, what is on, its counters and per-item state.

A session hangs on the model instance (and on the objects the model builds), so
two models in one process with different settings behave differently.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from omni_speech_accel import __version__
from omni_speech_accel.plugin.metrics import ItemCounters, open_export
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.settings import BLOCK, Settings, resolve
from omni_speech_accel.plugin.table import PATCHES, StageModel

logger = logging.getLogger("vllm.omni_speech_accel")

_ATTRIBUTE = "_omni_speech_accel_session"
_T = TypeVar("_T")
_Options = TypeVar("_Options", bound=ItemOptions)
_current: ContextVar[StageSession | None] = ContextVar("omni_speech_accel_session", default=None)


class Item(Generic[_Options]):
    """One item in one stage: what its functions are handed, with the item's options, counters and state."""

    def __init__(self, session: StageSession, key: str) -> None:
        self.session = session
        self.key = key
        self.options: _Options = session.options(key)  # type: ignore[assignment]
        self.counters = session.counters(key)

    def state(self, factory: Callable[[], _T], name: str = "") -> _T:
        """The state that the item keeps for this stage, made once; ``name`` tells several apart."""
        return self.session.state(f"{self.key} {name}".rstrip(), factory)

    def reject(self, reason: str) -> None:
        """Take the item out of this stage for good, and say why (once)."""
        self.session.reject(self.key, reason)


class StageSession:
    """Settings and state of one model instance. Thread-safe.

    Args:
        settings: The validated block of this stage.
        stage: The stage's name in messages and metrics.
        unfit: ``{item: reason}`` of the items that do not fit this host or platform.
        model: The row of the stage; items that act elsewhere do not concern it. ``None``: all do.
    """

    def __init__(
        self, settings: Settings, stage: str, unfit: Mapping[str, str] | None = None, model: StageModel | None = None
    ) -> None:
        self.settings = settings
        self.stage = stage
        self._lock = threading.RLock()
        self._items = tuple(patch.key for patch in PATCHES if model is None or model in patch.acts)
        self._unfit: dict[str, str] = dict(unfit or {})
        self._rejected: set[str] = set()
        self._on = frozenset(key for key in self._items if settings.enabled(key) and key not in self._unfit)
        self._counters: dict[str, ItemCounters] = {}
        self._states: dict[str, Any] = {}
        self._handed: dict[str, Item[Any]] = {}
        self._idle: dict[str, str] = {}
        self._announced = False
        if self._on:
            open_export()

    def on(self, key: str) -> bool:
        """Whether item ``key`` acts in this stage. A set look-up: it stands on hot paths."""
        return key in self._on

    def options(self, key: str) -> ItemOptions:
        """The validated options of item ``key``."""
        return self.settings.options(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageSession:
        """A copied model is the same stage; locks and counters do not copy."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A pickled model has no session: it is read where there is no stage, maybe not even this package."""
        return type(None), ()

    def item(self, key: str) -> Item[Any]:
        """Item ``key`` of this stage. One look-up once it is made: it stands on hot paths."""
        found = self._handed.get(key)
        if found is None:
            with self._lock:
                found = self._handed.setdefault(key, Item(self, key))
        return found

    def idle(self, key: str, reason: str) -> None:
        """Note why item ``key``, though on, has nothing to do in this stage."""
        with self._lock:
            self._idle[key] = reason

    def reject(self, key: str, reason: str) -> None:
        """Take item ``key`` out of this stage for good, and say why (once).

        Until the start-up line a later reason replaces the earlier: the line tells what serves in the end.
        """
        with self._lock:
            if key in self._unfit and (self._announced or key not in self._rejected):
                return
            self._unfit[key] = reason
            self._rejected.add(key)
            asked = key in self._on
            self._on = self._on - {key}
            announced = self._announced
        if asked and announced:
            logger.warning("omni_speech_accel: stage %s: %s not applied: %s", self.stage, key, reason)

    def rejected(self, key: str) -> bool:
        """Whether item ``key`` acted on this stage and took itself out (:meth:`reject`)."""
        return key in self._rejected

    @property
    def not_applied(self) -> dict[str, str]:
        """``{item: reason}`` of the items that were asked for and do not act."""
        with self._lock:
            reasons = self._unfit
            return {key: reasons[key] for key in self._items if key in reasons and self.settings.enabled(key)}

    def counters(self, key: str) -> ItemCounters:
        """The counters of item ``key`` in this stage."""
        with self._lock:
            found = self._counters.get(key)
            if found is None:
                found = self._counters[key] = ItemCounters(self.stage, key)
            return found

    def snapshot(self) -> dict[str, dict[str, float]]:
        """All counters of this stage by item."""
        with self._lock:
            counters = list(self._counters.items())
        return {key: counter.snapshot() for key, counter in counters}

    def state(self, key: str, factory: Callable[[], _T]) -> _T:
        """The state that item ``key`` keeps for this stage, made once under the session's lock."""
        with self._lock:
            if key not in self._states:
                self._states[key] = factory()
            state: _T = self._states[key]
            return state

    def announce(self) -> None:
        """Log this stage's one start-up line (once)."""
        with self._lock:
            if self._announced:
                return
            self._announced = True
        logger.info("%s", self.describe())

    def describe(self) -> str:
        """The start-up line: version, host, items on, off, and not applied with the reason."""
        from omni_speech_accel.host.source import host_info

        head = f"omni_speech_accel {__version__}: stage {self.stage} on {host_info()}: "
        if not self.settings.present:
            return head + f"no {BLOCK} block, stock"
        refused = self.not_applied
        idle = {key: reason for key, reason in self._idle.items() if key in self._on}
        on = [key for key in self._items if key in self._on and key not in idle]
        off = [key for key in self._items if key not in self._on and key not in refused]
        parts = [f"on: {', '.join(on) or 'none'}", f"off: {', '.join(off) or 'none'}"]
        for word, reasons in (("idle", idle), ("not applied", refused)):
            if reasons:
                parts.append(f"{word}: " + ", ".join(f"{key} ({reason})" for key, reason in reasons.items()))
        return head + "; ".join(parts)


def attach(owner: object, session: StageSession) -> None:
    """Hang ``session`` on ``owner``, around ``nn.Module.__setattr__``."""
    owner.__dict__[_ATTRIBUTE] = session


def session_of(owner: object) -> StageSession | None:
    """The session that hangs on ``owner``, or ``None``."""
    try:
        found: StageSession | None = owner.__dict__.get(_ATTRIBUTE)
    except AttributeError:
        return None
    return found


def session_for(instance: object | None) -> StageSession | None:
    """The session of a wrapped method's ``instance``, or the current one for a module function."""
    return _current.get() if instance is None else session_of(instance)


def current_session() -> StageSession | None:
    """The session of the stage model that is running or being built in this context."""
    return _current.get()


@contextmanager
def use_session(session: StageSession | None) -> Iterator[None]:
    """Make ``session`` the current one, e.g. while a stage model builds its parts."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)


def _block_layers(vllm_config: Any) -> list[tuple[str, Any]]:
    """The blocks that reach this stage: the connector's ``extra`` first, ``additional_config`` overriding it."""
    layers: list[tuple[str, Any]] = []
    connector = getattr(getattr(vllm_config, "model_config", None), "stage_connector_config", None)
    extra = connector.get("extra", connector) if isinstance(connector, Mapping) else getattr(connector, "extra", None)
    for place, holder in (
        ("connectors.*.extra", extra),
        ("stages[].additional_config", getattr(vllm_config, "additional_config", None)),
    ):
        if isinstance(holder, Mapping) and BLOCK in holder:
            layers.append((f"{place}.{BLOCK}", holder[BLOCK]))
    return layers


def settings_from_vllm_config(vllm_config: Any) -> Settings:
    """The settings of the stage that ``vllm_config`` describes.

    Raises:
        SettingsError: A block is wrong; the stage must not start.
    """
    return resolve(*_block_layers(vllm_config))
