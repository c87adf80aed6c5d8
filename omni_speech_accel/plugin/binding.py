# SPDX-License-Identifier: Apache-2.0
"""Puts the table's wrappers on host symbols when their modules are imported, and takes them off again.

Two rules come from the stock NPU patches, which replace methods of the same
classes before or after us: a wrapper is recorded here, never recognised by
looking at the attribute (a stock patch may hold ours as its "original", and
patching again would wrap twice); and an attribute that is no longer ours is
left alone on removal, with our wrapper calling straight through.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from omni_speech_accel.host.symbol import Symbol
from omni_speech_accel.plugin.table import ANCHORS, PATCHES, Hook, Patch

logger = logging.getLogger("vllm.omni_speech_accel")

_lock = threading.RLock()
_installed = False
_hooked: set[str] = set()
_bound: dict[tuple[str, str, str], Bound] = {}

Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Bound:
    """A wrapper that stands on a host symbol. ``enabled`` false: it calls straight through."""

    symbol: Symbol
    parent: Any
    attribute: str
    original: Any
    wrapper: Any = None
    enabled: bool = True

    def restore(self) -> bool:
        """Put the original back, where the attribute is still our wrapper."""
        self.enabled = False
        if vars(self.parent).get(self.attribute) is not self.wrapper:
            return False
        setattr(self.parent, self.attribute, self.original)
        return True


class _BoundHostFunction(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """A host function as it is read off its class or instance: made at each access, as stock's method is."""

    def _bound_to(self) -> Any:
        """The instance of a method; None: of a class's or static method, or of a method read off the class."""
        return self._self_instance if self._self_binding == "function" else None

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        instance = self._bound_to()
        return getattr, (self._self_owner if instance is None else instance, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        instance = self._bound_to()
        return self if instance is None else getattr(copy.deepcopy(instance, memo), self.__name__)


class _HostFunction(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapper that copies and pickles as the function it stands for: by reference. wrapt's own refuses."""

    __bound_function_wrapper__ = _BoundHostFunction

    def __reduce_ex__(self, protocol: object) -> Any:
        owner = self._self_host
        return self.__qualname__ if isinstance(owner, ModuleType) else (getattr, (owner, self.__name__))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


def bound() -> tuple[Bound, ...]:
    """Every wrapper that stands on a host symbol now, in the order they were put there."""
    with _lock:
        return tuple(_bound.values())


class _Lazy:
    """``module:function``, imported on first use: item modules import torch."""

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function
        self._resolved: Callable[..., Any] | None = None

    def resolve(self) -> Callable[..., Any]:
        """The function; raises whatever its module's import raises."""
        if self._resolved is None:
            self._resolved = getattr(importlib.import_module(self._module), self._function)
        return self._resolved

    def __call__(self, *args: Any) -> Any:
        return self.resolve()(*args)


def _item_handler(patch: Patch, hook: Hook) -> Handler:
    key = patch.key
    act = _Lazy(patch.module, hook.wrapper)
    find = _Lazy("omni_speech_accel.plugin.session", "session_for")

    def handle(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = find(instance)
        if session is None or not (session.on(key) or (hook.lasting and session.rejected(key))):
            return wrapped(*args, **kwargs)
        try:
            function = act.resolve()
        except Exception as error:
            session.reject(key, f"its code could not be imported: {type(error).__name__}: {error}")
            return wrapped(*args, **kwargs)
        return function(session.item(key), wrapped, instance, *args, **kwargs)

    return handle


def _handlers() -> dict[str, list[tuple[str, Symbol, Handler]]]:
    """Per module: ``(owner, symbol, handler)``, anchors first so that a session is there for the items."""
    table: dict[str, list[tuple[str, Symbol, Handler]]] = {}
    for anchor in ANCHORS:
        lazy = _Lazy(anchor.implementation, anchor.wrapper)
        table.setdefault(anchor.symbol.module, []).append(("anchor", anchor.symbol, lazy))
    for patch in PATCHES:
        for hook in patch.hooks:
            handler = _item_handler(patch, hook)
            table.setdefault(hook.symbol.module, []).append((patch.key, hook.symbol, handler))
    return table


def _bind(owner: str, symbol: Symbol, handler: Handler, module: ModuleType) -> None:
    key = (owner, symbol.module, symbol.qualname)
    known = _bound.get(key)
    if known is not None:
        known.enabled = True
        return
    try:
        parent, attribute, original = wrapt.resolve_path(module, symbol.qualname)
    except AttributeError:
        return  # The probe tells why the item does not fit; the host stays stock here.
    if not (callable(original) or isinstance(original, classmethod | staticmethod)):
        return  # A property on this host, say: wrapped, it would hand out a proxy of its value.
    record = Bound(symbol, parent, attribute, original)

    def dispatch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not record.enabled:
            return wrapped(*args, **kwargs)
        return handler(wrapped, instance, args, kwargs)

    record.wrapper = _HostFunction(original, dispatch)
    record.wrapper._self_host = parent
    setattr(parent, attribute, record.wrapper)
    _bound[key] = record


def _bind_module(module: ModuleType) -> None:
    """Import hook: runs inside the host's import, so it must not raise."""
    with _lock:
        if not _installed:
            return
        for owner, symbol, handler in _handlers().get(module.__name__, ()):
            try:
                _bind(owner, symbol, handler, module)
            except Exception:
                logger.exception("omni_speech_accel: %s could not wrap %s; stock there", owner, symbol.qualname)


def install() -> None:
    """Bind modules that are imported already and hook the imports of the others."""
    global _installed
    with _lock:
        _installed = True
        table: Mapping[str, Any] = _handlers()
        for name in table:
            if name not in _hooked:
                _hooked.add(name)
                wrapt.register_post_import_hook(_bind_module, name)
            elif (module := sys.modules.get(name)) is not None:
                _bind_module(module)


def remove() -> None:
    """Restore every attribute that is still ours; switch the other wrappers off."""
    global _installed
    with _lock:
        _installed = False
        for key, record in reversed(list(_bound.items())):
            if record.restore():
                del _bound[key]
