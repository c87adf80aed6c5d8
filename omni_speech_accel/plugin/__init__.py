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

from omni_speech_accel.environment import PLUGIN_FILTER, killed

__all__ = ["is_registered", "register", "unregister"]


logger = logging.getLogger("vllm.omni_speech_accel")

_lock = threading.RLock()
_registered = False


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
    _say_what_the_filter_drops()


def _say_what_the_filter_drops() -> None:
    """Log it before the host fails for the lack of it: in a server's first process, and only where a filter is set."""
    if PLUGIN_FILTER not in os.environ:
        return
    try:
        from multiprocessing import parent_process

        if parent_process() is not None:
            return
        from omni_speech_accel.plugin.loading import plugin_status

        dropped = plugin_status().others_dropped
    except Exception:
        logger.exception("omni_speech_accel: the plugins that %s leaves out cannot be listed", PLUGIN_FILTER)
        return
    if dropped:
        logger.warning("omni_speech_accel: %s", dropped)


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
