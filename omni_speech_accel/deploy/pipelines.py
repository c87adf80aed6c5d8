# SPDX-License-Identifier: Apache-2.0
"""Which of the host's pipelines a deploy is for, read off the host's files."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from omni_speech_accel.deploy.files import DeployFile
from omni_speech_accel.host import source as host


def pipeline_stages(pipeline_cfg: Any) -> frozenset[int] | None:
    """The stages of a pipeline, ``None`` where it or they are not known."""
    stages = getattr(pipeline_cfg, "stages", None)
    return frozenset(stage.stage_id for stage in stages) if stages else None


@dataclass(frozen=True)
class _HostStage:
    stage_id: int


@dataclass(frozen=True)
class HostPipeline:
    """A pipeline as its source file states it: the part that judging a deploy needs."""

    model_type: str
    default_deploy_config_name: str | None
    stages: tuple[_HostStage, ...]


def _constant(call: ast.Call, name: str) -> Any:
    value = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else None


def _stage_numbers(pipeline: ast.Call) -> list[int]:
    """Stage ids where the call spells its stages out, else none."""
    stages = next((keyword.value for keyword in pipeline.keywords if keyword.arg == "stages"), None)
    elements = stages.elts if isinstance(stages, ast.Tuple) else []
    numbers = [_constant(element, "stage_id") if isinstance(element, ast.Call) else None for element in elements]
    known = [number for number in numbers if isinstance(number, int)]
    return known if len(known) == len(numbers) else []


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name
    ]


@lru_cache(maxsize=1)
def host_pipelines() -> dict[str, HostPipeline]:
    """The host's pipelines, read off its ``pipeline.py`` files: its registry imports every model it has."""
    location = host.host_info().location
    found: dict[str, HostPipeline] = {}
    for path in sorted((location / "model_executor" / "models").glob("*/pipeline.py")) if location else ():
        try:
            source = host.source_of(f"vllm_omni.model_executor.models.{path.parent.name}.pipeline")
        except host.UnreadableSource:
            continue
        for call in _calls(source[1], "PipelineConfig") if source else ():
            model_type = _constant(call, "model_type")
            if isinstance(model_type, str):
                stages = tuple(_HostStage(number) for number in _stage_numbers(call))
                default = _constant(call, "default_deploy_config_name")
                found[model_type] = HostPipeline(model_type, default, stages)
    return found


def _named(file: DeployFile, folder: Path) -> str | None:
    """The pipeline of the host's deploy file that ``file`` is, links followed, or has the name of."""
    names = {}
    for key, entry in host_pipelines().items():
        names[key] = key
        if entry.default_deploy_config_name:
            names[Path(entry.default_deploy_config_name).stem] = key
    for path in (Path(file.path).resolve(), Path(file.path)):
        if (folder / path.name).is_file():
            # A variant carries its pipeline's name in front: step_audio_2_async_chunk.yaml.
            fitting = [name for name in names if f"{path.stem}_".startswith(f"{name}_")]
            if fitting:
                return names[max(fitting, key=len)]
    return None


def _extra_keys(content: Mapping[str, Any]) -> set[str]:
    connectors = content.get("connectors")
    named = connectors.values() if isinstance(connectors, Mapping) else ()
    extras = [connector.get("extra") for connector in named if isinstance(connector, Mapping)]
    return {str(key) for extra in extras if isinstance(extra, Mapping) for key in extra}


@lru_cache(maxsize=4)
def _own_keys(folder: Path) -> dict[str, str]:
    """``{key: pipeline}`` of the connector ``extra`` keys that the host's deploy files have for one pipeline alone."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, set[str | None]] = {}
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.load(path.read_text(encoding="utf-8"), loader)
        if isinstance(content, Mapping):
            pipeline = content.get("pipeline") or _named(DeployFile(str(path), content, True), folder)
            for key in _extra_keys(content):
                found.setdefault(key, set()).add(pipeline)
    single = {key: next(iter(pipelines)) for key, pipelines in found.items() if len(pipelines) == 1}
    return {key: pipeline for key, pipeline in single.items() if pipeline is not None}


def pipeline_of(files: Sequence[DeployFile]) -> tuple[str | None, str]:
    """The pipeline that a deploy is for, and what it was guessed from (``""``: the chain says it).

    It is what a file says, else the one whose host file ends the chain. A copy of a host file is told by its
    name, then by keys that the host's files have for one pipeline alone.
    """
    named = next((file.content["pipeline"] for file in files if "pipeline" in file.content), None)
    if named:
        return str(named), ""
    location = host.host_info().location
    if location is None:
        return None, ""
    folder = location / "deploy"
    for stock in (True, False):
        for file in files:
            pipeline = _named(file, folder) if file.stock is stock else None
            if pipeline is not None:
                return pipeline, "" if stock else f"{file.path} has the name of the host's file"
    own = _own_keys(folder)
    keys = sorted({key for file in files for key in _extra_keys(file.content)} & set(own))
    fitting = {own[key] for key in keys}
    if len(fitting) == 1:
        return fitting.pop(), f"{', '.join(keys[:2])} among the connectors' keys"
    return None, ""
