# SPDX-License-Identifier: Apache-2.0
"""The deploy-YAML block ``omni_speech_accel`` -> validated settings.

A stage reads up to two blocks: ``connectors.*.extra`` and
``stages[].additional_config``; the second overrides the first, item by item
(:func:`resolve`).
No block: every item is off. A block that is wrong in any way raises
:class:`SettingsError` at start-up; it never falls back silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from omni_speech_accel.environment import kill_switch_problem
from omni_speech_accel.errors import UserError
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.table import PATCHES

BLOCK = "omni_speech_accel"
ALLOW_UNVERIFIED = "allow_unverified_host"
"""The block's one key that is no item: apply items over bodies of the host that no verified host has."""

_WORDS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


class SettingsError(UserError, ValueError):
    """A wrong ``omni_speech_accel`` block: the message names the key, its place and the nearest valid name."""


@dataclass(frozen=True)
class Settings:
    """Validated settings of one model instance. ``present`` is false where the YAML has no block."""

    present: bool = False
    items: Mapping[str, ItemOptions] = field(default_factory=dict)
    allow_unverified_host: bool = False

    def enabled(self, key: str) -> bool:
        """Whether the item ``key`` is asked for."""
        options = self.items.get(key)
        return options is not None and options.enabled

    def options(self, key: str) -> ItemOptions:
        """The options of item ``key``; raises ``KeyError`` where the block is absent."""
        return self.items[key]


def _known() -> Mapping[str, tuple[type[ItemOptions], bool]]:
    return {patch.key: (patch.options, patch.default) for patch in PATCHES}


def _nearest(name: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"? ' if close else ""


def _word(value: Any) -> Any:
    """YAML gives ``"false"`` as a string where it is quoted or comes from the environment: it is false."""
    return _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def _error(place: str, problem: str) -> SettingsError:
    return SettingsError(f"omni_speech_accel: {place}: {problem}")


def _item(place: str, model: type[ItemOptions], value: Any) -> ItemOptions:
    value = _word(value)
    if isinstance(value, bool):
        return model(enabled=value)
    if not isinstance(value, Mapping):
        raise _error(place, f"takes true, false or a mapping of options, not {value!r}")
    values = {key: _word(option) if key == "enabled" else option for key, option in value.items()}
    try:
        return model(**{str(key): option for key, option in values.items()})
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"])
        valid = sorted(model.model_fields)
        if first["type"] == "extra_forbidden":
            problem = f"unknown option; {_nearest(option, valid)}valid options: {', '.join(valid)}"
        else:
            problem = f"{first['msg']} (got {first['input']!r})"
        raise _error(f"{place}.{option}", problem) from None


def _allows_unverified(block: Any, place: str) -> bool:
    found = _word(block.get(ALLOW_UNVERIFIED, False)) if isinstance(block, Mapping) else False
    if not isinstance(found, bool):
        raise _error(f"{place}.{ALLOW_UNVERIFIED}", f"takes true or false, not {found!r}")
    return found


def parse_block(value: Any, place: str = BLOCK) -> dict[str, ItemOptions]:
    """Validate one block and fill in the items that it does not name.

    Args:
        value: ``True``, ``False`` or a mapping from item to ``True``, ``False`` or its options. It may also have
            ``allow_unverified_host``, which is no item.
        place: Where the block stands, for messages.

    Raises:
        SettingsError: An unknown item or option, a wrong type, or an option out of range.
    """
    known = _known()
    value = _word(value)
    if isinstance(value, bool):
        return {key: model(enabled=default and value) for key, (model, default) in known.items()}
    if not isinstance(value, Mapping):
        raise _error(place, f"takes true, false or a mapping of items, not {value!r}")
    unknown = [str(key) for key in value if key not in known and key != ALLOW_UNVERIFIED]
    if unknown:
        valid = [*known, ALLOW_UNVERIFIED]
        raise _error(
            f"{place}.{unknown[0]}",
            f"unknown item; {_nearest(unknown[0], valid)}valid items: {', '.join(valid)}",
        )
    _allows_unverified(value, place)
    return {
        key: _item(f"{place}.{key}", model, value[key]) if key in value else model(enabled=default)
        for key, (model, default) in known.items()
    }


def resolve(*layers: tuple[str, Any]) -> Settings:
    """Merge blocks, later ones overriding earlier ones item by item, into :class:`Settings`.

    A mapping overrides the items that it names; over ``false`` all others stay off. ``true`` and ``false`` override
    every item.

    Args:
        layers: ``(place, block)`` pairs. A block may be a bool or a mapping.

    Raises:
        SettingsError: Any layer is wrong, overridden ones included, or the kill switch has no known value.
    """
    if not layers:
        return Settings()
    problem = kill_switch_problem()
    if problem:
        raise SettingsError(problem)
    merged: Any = None
    for place, block in layers:
        parse_block(block, place)
        block = _word(block)
        if isinstance(block, Mapping) and merged is False:
            # Everything was off: what this layer does not name stays off.
            merged = dict.fromkeys(_known(), False)
        merged = {**merged, **block} if isinstance(block, Mapping) and isinstance(merged, Mapping) else block
    place = layers[-1][0]
    return Settings(True, parse_block(merged, place), _allows_unverified(merged, place))
