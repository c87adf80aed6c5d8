# SPDX-License-Identifier: Apache-2.0
"""What a deploy asks for and what the host will make of it, told without starting anything."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omni_speech_accel.anchors import deploy as anchor
from omni_speech_accel.deploy.blocks import Block
from omni_speech_accel.deploy.check import check
from omni_speech_accel.deploy.files import DeployFile, read_chain
from omni_speech_accel.deploy.pipelines import host_pipelines, pipeline_of, pipeline_stages
from omni_speech_accel.items import fish_omni_full_graph
from omni_speech_accel.items.fish_omni_full_graph import GraphReport
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.settings import SettingsError
from omni_speech_accel.plugin.table import patch_for


@dataclass(frozen=True)
class StageItems:
    """The items that a stage's blocks ask for, before host and platform are judged."""

    stage: int
    present: bool
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeployReport:
    """What a deploy asks of this package and what the host will make of it. ``asdict`` of it is JSON.

    ``error`` is what would stop the start: a wrong block or a file that is not
    there. ``refusal`` is what the host itself would stop with on this platform.
    """

    deploy: str | None
    pipeline: str | None
    platform: str | None
    files: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    stages: tuple[StageItems, ...] = ()
    graphs: GraphReport | None = None
    refusal: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for a terminal."""
        text = [f"deploy: {self.deploy}, pipeline {self.pipeline} on {self.platform}"]
        text += [f"file: {path}" for path in self.files]
        text += [f"block: {place}" for place in self.blocks]
        for stage in self.stages:
            if stage.present:
                text.append(f"stage {stage.stage}: on: {', '.join(stage.on) or 'none'}")
        if self.graphs is not None:
            text.append(self.graphs.line())
            text += [f"set by the user: {name}" for name in self.graphs.user_settings]
        if self.refusal:
            text.append(f"the host will refuse to start: {self.refusal}")
        if self.error:
            text.append(f"error: {self.error}")
        return text


def _refusal(deploy: Any, platform: str | None) -> str:
    """What the host stops with when it applies the platform's overrides, or ``""``."""
    from vllm_omni.config.stage_config import _apply_platform_overrides

    try:
        _apply_platform_overrides(deepcopy(deploy), platform=platform)
    except NotImplementedError as error:
        return str(error)
    return ""


def explain(
    deploy_config: str | Path | None = None,
    *,
    pipeline: str | None = None,
    platform: str | None = None,
    cli_overrides: Mapping[str, Any] | None = None,
) -> DeployReport:
    """What a deploy asks for and what will come of it, without starting anything. Imports the host.

    Args:
        deploy_config: A deploy YAML, by path or by the name of one that the host ships; ``None``: the
            default deploy of ``pipeline``.
        pipeline: The host's pipeline key, where the deploy does not tell it.
        platform: ``cuda``, ``npu``, ...; default: the host's own.
        cli_overrides: Command-line settings in the host's spelling (``enforce_eager``, ``stage_0_max_num_seqs``).
    """
    cli = dict(cli_overrides or {})
    platform = anchor.host_platform() if platform is None else platform.lower()
    path = None if deploy_config is None else str(deploy_config)
    known = host_pipelines().get(pipeline or "")
    files: tuple[DeployFile, ...] = ()
    blocks: tuple[Block, ...] = ()
    stages: tuple[StageItems, ...] = ()
    graphs: GraphReport | None = None
    refusal = error = ""
    try:
        if path is None and (known is None or known.default_deploy_config_name is None):
            raise ValueError(f"this host has no deploy for the pipeline {pipeline}")
        if path is not None and Path(path).is_file():
            check(read_chain(Path(path)), platform, stages=pipeline_stages(known))
        try:
            deploy = anchor._load(known, None, path)
            refusal = _refusal(deploy.config, platform)
        except (AttributeError, KeyError, TypeError) as problem:
            raise SettingsError(f"{path}: the host cannot read it: {type(problem).__name__}: {problem}") from problem
        files, path = deploy.files, deploy.path
        pipeline = pipeline or pipeline_of(files)[0]
        known = host_pipelines().get(pipeline or "")
        blocks = check(files, platform, stages=pipeline_stages(known), pipeline=pipeline).blocks
        effective = anchor._effective(deploy.config, platform)
        found = []
        for stage in effective.stages:
            settings = anchor._stage_settings(deploy.config, effective, stage.stage_id, cli)
            on = tuple(key for key in settings.items if settings.enabled(key))
            off = tuple(key for key in settings.items if not settings.enabled(key))
            found.append(StageItems(stage.stage_id, settings.present, on, off))
        stages = tuple(found)
        if pipeline == fish_omni_full_graph.PIPELINE:
            graphs, _ = anchor._graphs(pipeline, deploy, platform, cli)
    except (SettingsError, OSError, ValueError) as problem:
        error = str(problem)
        judged = fit(patch_for(fish_omni_full_graph.KEY))
        if pipeline == fish_omni_full_graph.PIPELINE and not judged.applies:
            graphs = GraphReport(pipeline, platform, False, False, judged.reason)
    places = tuple(block.where for block in blocks)
    return DeployReport(path, pipeline, platform, tuple(f.path for f in files), places, stages, graphs, refusal, error)
