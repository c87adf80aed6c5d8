# SPDX-License-Identifier: Apache-2.0
"""The host's config builder, called as its server calls it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml
from vllm_omni.config import omni_config
from vllm_omni.config.omni_config import VllmOmniConfig

from omni_speech_accel import plugin

DEPLOY = Path(omni_config._DEPLOY_DIR)
SHM = "connector_of_shared_memory"


def fish() -> Any:
    return importlib.import_module("vllm_omni.model_executor.models.fish_omni.pipeline").FISH_OMNI_PIPELINE


def write(path: Path, base: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump({"base_config": str(base), **content}))
    return path


def build(path: Path | None, topology: Any = None, cli: dict[str, Any] | None = None, **more: Any) -> Any:
    return VllmOmniConfig.from_pipeline_config(
        topology if topology is not None else fish(),
        deploy_config_path=None if path is None else str(path),
        cli_overrides={"model": "none", **(cli or {})},
        **more,
    )


def stock(path: Path | None, topology: Any = None, cli: dict[str, Any] | None = None) -> Any:
    """What the host builds without us."""
    plugin.unregister()
    try:
        return build(path, topology, cli)
    finally:
        plugin.register()
