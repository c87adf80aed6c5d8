# SPDX-License-Identifier: Apache-2.0
"""The anchors' code: opens one session per stage model and hands it to the parts that the model builds."""

from __future__ import annotations

import logging
from typing import Any

from omni_speech_accel.plugin.fit import idle_reason, unfit_items
from omni_speech_accel.plugin.session import (
    StageSession,
    attach,
    current_session,
    session_of,
    settings_from_vllm_config,
    use_session,
)
from omni_speech_accel.plugin.table import PATCHES, STAGE_MODELS, StageModel
from omni_speech_accel.runtime import accelerator_for

logger = logging.getLogger("vllm.omni_speech_accel")


def device_type() -> str:
    """Device type of the active platform: ``cuda``, ``npu``, ...; ``cpu`` where the host knows none."""
    from vllm_omni.platforms import current_omni_platform

    return getattr(current_omni_platform, "device_type", "") or "cpu"


_MODELS = {name: model for model in STAGE_MODELS for name in model.classes}


def open_session(vllm_config: Any, model: object, row: StageModel | None = None) -> StageSession:
    """The session of the stage whose model ``vllm_config`` builds. ``row``: which stage it is, else told by its class.

    Raises:
        SettingsError: A block in the deploy YAML is wrong; the stage must not start.
    """
    settings = settings_from_vllm_config(vllm_config)
    name = next(cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _MODELS)
    row = row or _MODELS[name]
    stage = getattr(getattr(vllm_config, "model_config", None), "model_stage", None) or name
    try:
        unfit = unfit_items(settings, row, device_type())
    except Exception as error:
        logger.exception("omni_speech_accel: the host could not be judged; stage %s runs stock", stage)
        unfit = {patch.key: f"the host could not be judged: {error}" for patch in PATCHES}
    return StageSession(settings, str(stage), unfit, row)


def _vllm_config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["vllm_config"] if "vllm_config" in kwargs else (args[0] if args else None)


def stage_model_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the stage's session before its model is built."""
    session = open_session(_vllm_config(args, kwargs), instance)
    with use_session(session):
        result = wrapped(*args, **kwargs)
    attach(instance, session)
    return result


def announced_model_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """:func:`stage_model_init` of a model whose parts load lazily: its line is due now."""
    result = stage_model_init(wrapped, instance, args, kwargs)
    session = session_of(instance)
    if session is not None:
        session.announce()
    return result


def check_runtime(session: StageSession) -> None:
    """Hold the device runtime against what a graph capture of the stage's items needs.

    Here, and not at the first capture: that one runs inside the host's precapture of the default prompt, which turns
    every exception into a warning, drops its own graphs, and leaves the requests to fail one by one.

    Raises:
        RuntimeSetupError: A variable of the environment makes a right capture impossible; it names the variable.
    """
    device = device_type()
    if any(patch.captures and session.on(patch.key) for patch in PATCHES):
        accelerator_for(device).check_setup(device)


def build_backend(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand the stage's session to the backend that is built, and log the stage's line once it stands.

    Raises:
        RuntimeSetupError: The device runtime is set up so that no graph of the stage's items could be right.
    """
    session = session_of(instance)
    if session is not None:
        check_runtime(session)
    with use_session(session):
        result = wrapped(*args, **kwargs)
    if session is not None:
        for patch in PATCHES:
            if session.on(patch.key) and (reason := idle_reason(patch, instance.backend)):
                session.idle(patch.key, reason)
        session.announce()
    return result


def core_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hang the builder's session on a Token2Wav core; a core built outside a stage model asks vLLM's current config."""
    result = wrapped(*args, **kwargs)
    session = current_session()
    if session is None:
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None:
            session = open_session(vllm_config, instance)
            session.announce()
    if session is not None:
        attach(instance, session)
    return result


def facade_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hang the session of the core on the facade that has built it."""
    result = wrapped(*args, **kwargs)
    session = session_of(getattr(instance, "_core", None))
    if session is not None:
        attach(instance, session)
    return result


def backend_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hang the session on a batched backend; its constructor may run CUDA work that items do not touch."""
    result = wrapped(*args, **kwargs)
    session = current_session()
    if session is None:
        facade = kwargs.get("token2wav", args[0] if args else None)
        session = session_of(getattr(facade, "_core", None))
    if session is not None:
        attach(instance, session)
    return result


def with_session(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the model's session current for the module functions that it calls."""
    session = session_of(instance)
    if session is None or not session.settings.present:
        return wrapped(*args, **kwargs)
    with use_session(session):
        return wrapped(*args, **kwargs)
