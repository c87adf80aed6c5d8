# SPDX-License-Identifier: Apache-2.0
"""Serve stock vllm-omni speech stages from codec ids on a CPU.

A speech model needs a thinker and a talker of many gigabytes before its first codec token. The stages that turn tokens
into sound need neither: these pipelines put the *stock* stage classes behind ``POST /v1/audio/speech`` with the codec
tokens as the text of the request. Everything is registered through the host's own registries.
"""

from __future__ import annotations

import multiprocessing

_registered = False


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; runs in every process of the server."""
    global _registered
    if _registered:
        return
    _registered = True
    from omni_speech_test_host.pipelines import register_pipelines

    register_pipelines()
    # Only the API server answers HTTP, and only it is not a child of multiprocessing. The adapter's imports would
    # cost the engine and worker processes seconds each.
    if multiprocessing.parent_process() is None:
        from omni_speech_test_host.adapter import register_adapter

        register_adapter()
