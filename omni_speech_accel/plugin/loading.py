# SPDX-License-Identifier: Apache-2.0
"""How vLLM's plugin loader sees this package, and what ``VLLM_PLUGINS`` leaves out.

A list of ours alone drops the host's own plugins: it then fails with a ``KeyError``
of a pipeline that is not registered, which does not name the list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from omni_speech_accel.environment import PLUGIN_FILTER

PLUGIN = "omni_speech_accel"
ENGINE_GROUP = "vllm.general_plugins"


@dataclass(frozen=True)
class PluginStatus:
    """How vLLM's plugin loader sees this package.

    ``recommended`` is the ``VLLM_PLUGINS`` value that loads every installed
    plugin; the filter applies to all groups, so a shorter list drops others.
    """

    installed: bool
    filter: str | None
    loaded: bool
    dropped: tuple[str, ...]
    recommended: str

    @property
    def others_dropped(self) -> str:
        """What the filter leaves out beside this package, and what to do; ``""``: nothing."""
        others = [name for name in self.dropped if name != PLUGIN]
        if not others:
            return ""
        return (
            f"{PLUGIN_FILTER}={self.filter} filters plugins of every group and drops {', '.join(others)}; "
            f"unset it or use {PLUGIN_FILTER}={self.recommended}"
        )


def _host_plugins() -> Iterator[metadata.EntryPoint]:
    """Entry points of every group that ``VLLM_PLUGINS`` filters."""
    for distribution in metadata.distributions():
        for point in distribution.entry_points:
            if point.group.startswith(("vllm.", "vllm_omni.")):
                yield point


def plugin_status() -> PluginStatus:
    """Whether vLLM's loader would load this package, and what a filter in the environment drops."""
    points = list(_host_plugins())
    names = sorted({point.name for point in points} | {PLUGIN})
    installed = any(point.name == PLUGIN and point.group == ENGINE_GROUP for point in points)
    raw = os.environ.get(PLUGIN_FILTER)
    # As vLLM reads it: a name with a space beside it is another name.
    allowed = None if raw is None else set(raw.split(","))
    dropped = () if allowed is None else tuple(name for name in names if name not in allowed)
    return PluginStatus(
        installed=installed,
        filter=raw,
        loaded=installed and PLUGIN not in dropped,
        dropped=dropped,
        recommended=",".join(names),
    )
