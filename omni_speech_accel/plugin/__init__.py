# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point.

vLLM calls :func:`register` in the API server, in the model-inspection
subprocess, in every engine core and in every worker, before the model classes
are imported there. An exception in it would abort the plugins that come after
ours and is never retried, so :func:`register` never raises: it logs once and
leaves the host stock.

Nothing here imports torch, vllm or vllm_omni. Host modules are patched when
they are imported (or at once, where the NPU platform has imported them before
us), and what a patch does is decided per model instance, when its settings
are known.
"""

from __future__ import annotations

import logging
import os
import threading

__all__ = ["KILL_SWITCH", "is_registered", "kill_switch_problem", "killed", "register", "unregister"]

KILL_SWITCH = "OMNI_SPEECH_ACCEL"
"""Environment variable; a false value switches everything off, whatever the deploy YAML says."""

_FALSE = frozenset({"0", "false", "off", "no"})
_TRUE = frozenset({"", "1", "true", "on", "yes"})

logger = logging.getLogger("vllm.omni_speech_accel")

_lock = threading.RLock()
_registered = False


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


def register() -> None:
    """Install the import hooks. Idempotent, thread-safe, never raises."""
    global _registered
    with _lock:
        if _registered or killed():
            return
        try:
            from omni_speech_accel.plugin import binding

            binding.install()
        except Exception:
            logger.exception("omni_speech_accel could not be registered; the server runs stock")
            return
        _registered = True


def unregister() -> None:
    """Undo :func:`register`: stock attributes are restored.

    Where another party has wrapped one of our wrappers since (the stock NPU
    patches do), that wrapper stays in place and calls straight through, since
    restoring the attribute would drop the other party's patch.
    """
    global _registered
    with _lock:
        if not _registered:
            return
        from omni_speech_accel.plugin import binding

        binding.remove()
        _registered = False


def is_registered() -> bool:
    """Whether the import hooks are installed in this process."""
    return _registered
