# SPDX-License-Identifier: Apache-2.0
"""May an item act here? One sentence per reason."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from omni_speech_accel.host import source as host
from omni_speech_accel.host.source import Definition, UnreadableSource
from omni_speech_accel.host.symbol import Symbol
from omni_speech_accel.plugin.settings import ALLOW_UNVERIFIED, Settings
from omni_speech_accel.plugin.table import PATCHES, StageModel

if TYPE_CHECKING:
    from omni_speech_accel.plugin.table import Patch


_ADVICE = f"where `omni-speech-accel verify` passes on this machine, `{ALLOW_UNVERIFIED}: true` in the block applies it"


@dataclass(frozen=True)
class Fit:
    """Whether a patch can be applied to the installed host.

    ``reason`` says why not, or ``""``. ``verified`` is false where all fits but the
    body of a function, which is one that the test-suite has never run on.
    """

    applies: bool
    reason: str = ""
    verified: bool = True


def _kind_problem(symbol: Symbol, node: Definition) -> str:
    """Why a function of ``node``'s kind is not the one that the patch calls: plain, or a class method on ``cls``."""
    wanted = "classmethod" if symbol.parameters and symbol.parameters[0] == "cls" else "plain"
    kind = host.kind_of(node)
    if kind in ("class", wanted):
        return ""
    return f"{symbol.qualname} is another kind of function on this host ({kind}, not {wanted})"


def _exists(symbol: Symbol) -> bool:
    source = host.source_of(symbol.module)
    return source is not None and host.definition_of(source[1], symbol.qualname) is not None


def _symbol_problem(symbol: Symbol) -> str:
    source = host.source_of(symbol.module)
    if source is None:
        return f"the host has no module {symbol.module}"
    node = host.definition_of(source[1], symbol.qualname)
    if node is None:
        return f"the host has no {symbol.module}:{symbol.qualname}"
    if symbol.parameters is not None:
        signature = host.parameters_of(node)
        if signature is None:
            return f"{symbol.qualname} is not a function on this host"
        names, needed, _ = signature
        missing = [name for name in symbol.parameters if name not in names]
        unknown = [name for name in needed if name not in symbol.parameters]
        if missing or unknown:
            detail = "; ".join(
                part
                for part in (
                    f"no parameter {', '.join(missing)}" if missing else "",
                    f"new required parameter {', '.join(unknown)}" if unknown else "",
                )
                if part
            )
            return f"{symbol.qualname} has another signature on this host ({detail})"
    return _kind_problem(symbol, node)


def is_verified(symbol: Symbol) -> bool:
    """Whether the host's body of ``symbol`` is one that the test-suite runs on."""
    known = host.verified_fingerprints().get(f"{symbol.module}:{symbol.qualname}", {})
    return host.fingerprint(symbol.module, symbol.qualname) in known


def fit(patch: Patch, *, allow_unverified: bool = False) -> Fit:
    """Judge ``patch`` against the installed host's files.

    Args:
        patch: The item's row.
        allow_unverified: A function whose body differs from every verified host's will do, where it is only called.
    """
    if host.host_info().version is None:
        return Fit(False, "vllm-omni is not installed")
    try:
        return _judged(patch, allow_unverified)
    except UnreadableSource as error:
        return Fit(False, str(error))


def _judged(patch: Patch, allow_unverified: bool) -> Fit:
    for symbol in patch.native:
        if _exists(symbol):
            return Fit(False, f"the host does this itself ({symbol.qualname})")
    for symbol in patch.symbols:
        problem = _symbol_problem(symbol)
        if problem:
            return Fit(False, problem)
    changed = [symbol for symbol in patch.symbols if not is_verified(symbol)]
    restated = [symbol.qualname for symbol in changed if symbol.restated]
    if restated:
        return Fit(
            False, f"{', '.join(restated)} differs from every verified host, and this item restates it", verified=False
        )
    if changed and not allow_unverified:
        names = ", ".join(symbol.qualname for symbol in changed)
        return Fit(False, f"{names} differs from every verified host; {_ADVICE}", verified=False)
    return Fit(True, verified=not changed)


def idle_reason(patch: Patch, backend: Any) -> str:
    """Why an item that may act has nothing to do on a built ``backend``, or ``""``. Imports the item's module."""
    if not patch.idle or backend is None:
        return ""
    reason: str = getattr(import_module(patch.module), patch.idle)(backend)
    return reason


def unfit_items(settings: Settings, model: StageModel, device: str) -> dict[str, str]:
    """``{item: reason}`` of the items of the stage ``model`` that cannot act on this host or device."""
    reasons: dict[str, str] = {}
    if not settings.present:
        return reasons
    for patch in PATCHES:
        if model not in patch.acts:
            continue
        judged = fit(patch, allow_unverified=settings.allow_unverified_host)
        if not judged.applies:
            reasons[patch.key] = judged.reason
        elif device not in patch.platforms:
            reasons[patch.key] = f"for {' and '.join(patch.platforms)}, not {device}"
    return reasons
