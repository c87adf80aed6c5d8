# SPDX-License-Identifier: Apache-2.0
"""``speaker_device``: the CAM++ speaker embedding where the rest of the model runs.

Stock runs ``campplus.onnx`` in CPU onnxruntime with one thread unless TensorRT or
an NPU is there: 77-79 ms of the 144-155 ms that one reference costs on an H200
host. Our CAM++ is built from the same file and checked against onnxruntime over
several lengths when it is loaded; outside the tolerance stock's session stays.
A device model that the host installs itself is left in place.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from omni_speech_accel.items._prompt import loads_now
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.session import Item
from omni_speech_accel.plugin.table import SPEAKER_EMBEDDING, patch_for

KEY = "speaker_device"


def _is_cpu_session(model: Any) -> bool:
    import onnxruntime

    return model is None or isinstance(model, onnxruntime.InferenceSession)


def _is_ours(model: Any) -> bool:
    from omni_speech_accel.campplus.model import Campplus

    return isinstance(model, Campplus)


def _load(item: Item[ItemOptions], core: Any) -> Any | None:
    """Our CAM++ on the core's device, or ``None`` with the item rejected for this stage."""
    from omni_speech_accel.campplus.model import load_campplus

    onnx_path = Path(core.model_path) / "campplus.onnx"
    try:
        return load_campplus(onnx_path, core.device, patch_for(KEY).tolerances[SPEAKER_EMBEDDING])
    except Exception as error:
        # Whatever keeps our model from standing (format, parity, memory), stock's own session serves the stage.
        item.reject(f"{type(error).__name__}: {error}")
        return None


def ensure_models_loaded(item: Item[ItemOptions], wrapped: Any, core: Any, /) -> None:
    """Put our CAM++ in place of stock's CPU session once the models are loaded."""
    if not loads_now(item, wrapped, core):
        return
    if _is_ours(core._spk_model):
        return
    if _tell_what_serves(item, core):
        return
    if core.device.type == "npu" and hasattr(core, "enable_device_spk_embedding"):
        # The stage's next step puts the host's own there; ours would have been loaded and checked for nothing.
        item.reject("the host has a CAM++ of its own for npu")
        return
    model = _load(item, core)
    if model is not None:
        core._spk_model = model


def forward_spk_embedding(item: Item[ItemOptions], wrapped: Any, core: Any, /, spk_feat: torch.Tensor) -> Any:
    """Count the embeddings that stock's method has our model make. Where ``speaker_graph`` replays, that one counts."""
    if _is_ours(core.spk_model):
        item.counters.inc("calls")
    return wrapped(spk_feat)


def _tell_what_serves(item: Item[ItemOptions], core: Any) -> bool:
    """Whether the host has put a model of its own in place; the item is then taken out, and says which one serves."""
    model = core._spk_model
    if _is_cpu_session(model) or _is_ours(model):
        return False
    item.reject(f"the host's own {type(model).__name__} serves")
    return True


def enable_trt_spk_embedding(item: Item[ItemOptions], wrapped: Any, core: Any, /, **kwargs: Any) -> None:
    """Stock's TensorRT switch, also for callers that pass a later host's ``cpu_reference``.

    ``cpu_reference`` tells those hosts to keep a CPU session beside the engine for comparison; a host without the
    parameter has none to keep.
    """
    wrapped(**_known(wrapped, kwargs, "cpu_reference"))
    _tell_what_serves(item, core)


def enable_device_spk_embedding(item: Item[ItemOptions], wrapped: Any, core: Any, /, **kwargs: Any) -> None:
    """Stock's device switch, also for callers that pass a later host's ``use_trt``.

    ``use_trt=False`` on CUDA asks for a torch model instead of TensorRT: that is our CAM++. Where that one may not be
    used (its check at load failed), stock's CPU session stays on a host that could only answer with TensorRT.
    """
    if not kwargs.get("use_trt", True) and core.device.type == "cuda":
        model = _load(item, core) if item.session.on(KEY) else None
        if model is not None:
            core._spk_model = model
            return
        if "use_trt" not in inspect.signature(wrapped).parameters:
            return
    wrapped(**_known(wrapped, kwargs, "use_trt"))
    _tell_what_serves(item, core)


def of_the_core(item: Item[ItemOptions], wrapped: Any, facade: Any, /, **kwargs: Any) -> None:
    """MiniCPM-o's facade hands its two switches on to the core; ours takes the parameters that the core's take."""
    if not kwargs:
        wrapped()
        return
    getattr(facade._core, wrapped.__name__)(**kwargs)


def _known(wrapped: Any, kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """``kwargs`` without ``name`` where this host's method does not take it."""
    if name in kwargs and name not in inspect.signature(wrapped).parameters:
        return {key: value for key, value in kwargs.items() if key != name}
    return kwargs
