# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the package reads, and the one set of true and false words."""

from __future__ import annotations

import os
import re

KILL_SWITCH = "OMNI_SPEECH_ACCEL"
"""Environment variable; a false value switches everything off, whatever the deploy YAML says."""

BLOCKING_COPY = "OMNI_SPEECH_ACCEL_BLOCKING_COPY"
"""A true value makes every upload wait, as stock does: for a driver that misorders pinned copies."""

METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's: where the processes of a server leave their counts for its ``/metrics``."""

PLUGIN_FILTER = "VLLM_PLUGINS"
"""vLLM's: names of the plugins that it loads, of every group; without it all of them load."""

_FALSE = frozenset({"0", "false", "off", "no"})
_TRUE = frozenset({"1", "true", "on", "yes"})


def _word(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()


def _problem(variable: str) -> str:
    if _word(variable) in _FALSE | _TRUE | {""}:
        return ""
    return f"{variable}={os.environ[variable]} in the environment: takes 0, false, off or no; 1, true, on or yes"


def killed() -> bool:
    """Whether :data:`KILL_SWITCH` switches the package off in this process."""
    return _word(KILL_SWITCH) in _FALSE


def kill_switch_problem() -> str:
    """Why the value of :data:`KILL_SWITCH` is neither on nor off; ``""`` where it is one of them.

    Taken for "on" it would leave the items running that somebody meant to stop, so a stage with a block does not start.
    """
    return _problem(KILL_SWITCH)


def blocking_copy_requested() -> bool:
    """Whether :data:`BLOCKING_COPY` asks for uploads that wait."""
    return _word(BLOCKING_COPY) in _TRUE


def blocking_copy_problem() -> str:
    """Why the value of :data:`BLOCKING_COPY` is neither on nor off; ``""`` where it is one of them."""
    return _problem(BLOCKING_COPY)


def npu_capture_problem() -> str:
    """Which variable rules out every graph capture on an Ascend NPU, and what to do; ``""``: none."""
    # Read as torch_npu reads them, with strtol.
    if _number("ASCEND_LAUNCH_BLOCKING", 0) == 1:
        return (
            "ASCEND_LAUNCH_BLOCKING=1 makes every launch wait, which no graph capture can record; "
            "unset ASCEND_LAUNCH_BLOCKING or turn the graph items off"
        )
    # torch_npu: NPUGraph::capture_begin refuses level 2, whose launches are prepared on a second thread.
    if _number("TASK_QUEUE_ENABLE", 1) == 2:
        return (
            "TASK_QUEUE_ENABLE=2 is refused by torch_npu at the begin of every graph capture; "
            "set TASK_QUEUE_ENABLE=1 or turn the graph items off"
        )
    return ""


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable)
    if value is None:
        return default
    found = re.match(r"\s*([+-]?\d+)", value)
    return int(found[1]) if found else 0
