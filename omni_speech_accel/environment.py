# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the package reads, and the one set of true and false words."""

from __future__ import annotations

import os

__all__ = ["KILL_SWITCH", "kill_switch_problem", "killed"]

KILL_SWITCH = "OMNI_SPEECH_ACCEL"
"""Environment variable; a false value switches everything off, whatever the deploy YAML says."""


_FALSE = frozenset({"0", "false", "off", "no"})


_TRUE = frozenset({"", "1", "true", "on", "yes"})


def _switch() -> str:
    return os.environ.get(KILL_SWITCH, "").strip().lower()


def killed() -> bool:
    """Whether :data:`KILL_SWITCH` switches the package off in this process."""
    return _switch() in _FALSE


def kill_switch_problem() -> str:
    """Why the value of :data:`KILL_SWITCH` is neither on nor off; ``""`` where it is one of them.

    Taken for "on" it would leave the items running that somebody meant to stop, so a stage with a block does not start.
    """
    if _switch() in _FALSE | _TRUE:
        return ""
    return f"{KILL_SWITCH}={os.environ[KILL_SWITCH]} in the environment: takes 0, false, off or no; 1, true, on or yes"
