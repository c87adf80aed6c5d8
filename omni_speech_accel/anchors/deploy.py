# SPDX-License-Identifier: Apache-2.0
"""The anchor on the host's config builder, and the same judgement for ``status``.

The anchor runs in the API server before any stage process starts. It checks
every block of the deploy, those of other stages and in places that the host
ignores included, and lets ``fish_omni_full_graph`` change a copy of the deploy.
Deploys without a block pass through untouched.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from omni_speech_accel.deploy.blocks import Block, check_blocks, check_reached, find_blocks
from omni_speech_accel.deploy.files import DeployFile, check_shape, read_chain
from omni_speech_accel.deploy.layering import ADDITIONAL, check_connectors, merged
from omni_speech_accel.deploy.pipelines import host_pipelines, pipeline_of, pipeline_stages
from omni_speech_accel.environment import killed
from omni_speech_accel.items import fish_omni_full_graph
from omni_speech_accel.items.fish_omni_full_graph import GraphReport
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.options import FullGraphOptions
from omni_speech_accel.plugin.settings import BLOCK, Settings, SettingsError, parse_block, resolve
from omni_speech_accel.plugin.table import patch_for

__all__ = [
    "DeployReport",
    "StageItems",
    "explain",
    "from_pipeline_config",
]

logger = logging.getLogger("vllm.omni_speech_accel")

_OBJECT = "user_deploy_config"


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


@dataclass(frozen=True)
class _Deploy:
    """A deploy config as the host loads it, with the files it came from.

    ``given``: it is the caller's own object; ``source`` is the file that it was made from, where there is one.
    """

    config: Any
    path: str | None
    files: tuple[DeployFile, ...]
    given: bool = False
    source: Path | None = None

    @property
    def object_file(self) -> DeployFile:
        """The config in the shape of a file of the chain."""
        return DeployFile(_OBJECT, _content(self.config), False)


def _load_yaml(path: Path) -> Mapping[str, Any]:
    from vllm_omni.config.yaml_util import load_yaml_config, to_dict

    content: Mapping[str, Any] = to_dict(load_yaml_config(path))
    return content


def _platform() -> str | None:
    """The name that the host picks the deploy's platform section by."""
    from vllm_omni.platforms import current_omni_platform

    name = current_omni_platform.device_name
    return None if name is None else str(name).lower()


def _content(deploy: Any) -> dict[str, Any]:
    """A deploy config object in the shape of a deploy file, as far as blocks and graph settings go."""
    stages = []
    for stage in deploy.stages:
        own = {
            "enforce_eager": stage.enforce_eager,
            "compilation_config": stage.compilation_config,
            "input_connectors": stage.input_connectors,
            "output_connectors": stage.output_connectors,
        }
        stages.append(
            {
                "stage_id": stage.stage_id,
                **{key: value for key, value in own.items() if value is not None},
                **stage.engine_extras,
            }
        )
    return {
        "connectors": deploy.connectors or {},
        "edges": deploy.edges or [],
        "stages": stages,
        "platforms": deploy.platforms or {},
    }


def _load(pipeline_cfg: Any, user_deploy_config: Any, deploy_config_path: str | None) -> _Deploy:
    from vllm_omni.config import omni_config

    deploy, path = omni_config._get_deploy_config(pipeline_cfg, user_deploy_config, deploy_config_path)
    folder = Path(omni_config._DEPLOY_DIR)
    files = () if path is None else read_chain(Path(path), _load_yaml, folder)
    if user_deploy_config is None and path is not None:
        return _Deploy(deploy, path, files)
    name = getattr(pipeline_cfg, "default_deploy_config_name", None)
    source = Path(path) if path else folder / name if name else None
    return _Deploy(deploy, path, files, True, source)


def _baseline(deploy: _Deploy) -> Mapping[str, Any] | None:
    """What the caller's object was made from, so that only what differs counts as set by the caller."""
    from vllm_omni.config.stage_config import load_deploy_config

    if not deploy.given:
        return None
    return {} if deploy.source is None else _content(load_deploy_config(deploy.source))


def _effective(deploy: Any, platform: str | None) -> Any:
    """A copy of ``deploy`` with the platform's overrides applied by the host, its model runner left out of it."""
    from vllm_omni.config.stage_config import _apply_platform_overrides

    changed = copy.deepcopy(deploy)
    section = (changed.platforms or {}).get(platform)
    if isinstance(section, dict):
        section.pop("model_runner", None)
        for entry in section.get("stages") or ():
            entry.pop("model_runner", None)
    changed.model_runner = "v1"
    for stage in changed.stages:
        if hasattr(stage, "model_runner"):
            stage.model_runner = None
    return _apply_platform_overrides(changed, platform=platform)


def _refusal(deploy: Any, platform: str | None) -> str:
    """What the host stops with when it applies the platform's overrides, or ``""``."""
    from vllm_omni.config.stage_config import _apply_platform_overrides

    try:
        _apply_platform_overrides(copy.deepcopy(deploy), platform=platform)
    except NotImplementedError as error:
        return str(error)
    return ""


def _connector_extra(deploy: Any, stage_id: int) -> Mapping[str, Any]:
    """The connector ``extra`` that the host hands to a stage: of an edge into it, else of one out of it."""
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config

    # The host reads connectors from the deploy file, so the platform's overrides do not touch them.
    transfer = load_omni_transfer_config(config_dict=_content(deploy))
    edges = transfer.connectors if transfer is not None else {}
    for side in (1, 0):  # engine.stage_init_utils.get_stage_connector_spec: receiver before sender
        for edge, spec in edges.items():
            if edge[side] == str(stage_id):
                return spec.extra or {}
    return {}


def _stage_settings(deploy: Any, effective: Any, stage_id: int, cli: Mapping[str, Any]) -> Settings:
    """The settings that the worker of ``stage_id`` will read."""
    layers: list[tuple[str, Any]] = []
    extra = _connector_extra(deploy, stage_id)
    if BLOCK in extra:
        layers.append((f"connectors.*.extra.{BLOCK}", extra[BLOCK]))
    stage = next((stage for stage in effective.stages if stage.stage_id == stage_id), None)
    config = stage.engine_extras.get(ADDITIONAL) if stage is not None else None
    block = config.get(BLOCK) if isinstance(config, Mapping) else None
    found = isinstance(config, Mapping) and BLOCK in config
    for name in (ADDITIONAL, f"stage_{stage_id}_{ADDITIONAL}"):
        over = cli.get(name)
        if isinstance(over, Mapping) and BLOCK in over:
            # The host merges mappings of the command line into the deploy's, key by key.
            value = over[BLOCK]
            block = {**block, **value} if isinstance(block, Mapping) and isinstance(value, Mapping) else value
            found = True
    if found:
        layers.append((f"stages[{stage_id}].{ADDITIONAL}.{BLOCK}", block))
    return resolve(*layers)


def _cli_blocks(cli: Mapping[str, Any]) -> list[Block]:
    return [
        Block(f"{name.replace('_', '-')}.{BLOCK}", value[BLOCK], file="--")
        for name, value in cli.items()
        if name.endswith(ADDITIONAL) and isinstance(value, Mapping) and BLOCK in value
    ]


def _check(deploy: _Deploy, platform: str | None, cli: Mapping[str, Any], stage_ids: frozenset[int] | None) -> bool:
    """Check every block; whether there is one.

    Raises:
        SettingsError: A block is wrong, or stands where it reaches no stage.
    """
    # The files first, since a message names a file where it can; the whole after them, since a caller may have put a
    # block into it, and one file of the chain can spoil a place of another's.
    whole = deploy.object_file
    blocks = list(check_blocks((*deploy.files, whole)))
    for block in _cli_blocks(cli):
        parse_block(block.value, f"{block.file}{block.place}")
        blocks.append(block)
    if not blocks:
        return False
    check_reached(whole.content, platform, blocks, stage_ids)
    return True


def _graphs(
    pipeline: str, deploy: _Deploy, platform: str | None, cli: Mapping[str, Any]
) -> tuple[GraphReport, Any | None]:
    """The graph item's verdict on a checked deploy."""
    effective = partial(_effective, platform=platform)
    stage = fish_omni_full_graph.STAGE
    settings = _stage_settings(deploy.config, effective(deploy.config), stage, cli)
    options = settings.items.get(fish_omni_full_graph.KEY)
    assert options is None or isinstance(options, FullGraphOptions)
    judged = fit(patch_for(fish_omni_full_graph.KEY))
    return fish_omni_full_graph.plan(
        pipeline=pipeline,
        platform=platform,
        deploy=deploy.config,
        effective=effective,
        options=options,
        files=(deploy.object_file, *deploy.files) if deploy.given else deploy.files,
        cli=cli,
        baseline=_baseline(deploy),
        unfit="" if judged.applies else judged.reason,
    )


def _prepared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for the stock call."""
    pipeline_cfg = args[0] if args else kwargs["pipeline_cfg"]
    cli = kwargs.get("cli_overrides") or {}
    deploy = _load(pipeline_cfg, kwargs.get("user_deploy_config"), kwargs.get("deploy_config_path"))
    platform = _platform()
    if not _check(deploy, platform, cli, pipeline_stages(pipeline_cfg)):
        return kwargs
    if pipeline_cfg.model_type != fish_omni_full_graph.PIPELINE:
        return kwargs
    report, edited = _graphs(pipeline_cfg.model_type, deploy, platform, cli)
    logger.info("omni_speech_accel: %s", report.line())
    if edited is None:
        return kwargs
    return {**kwargs, "user_deploy_config": edited, "deploy_config_path": deploy.path}


def from_pipeline_config(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check the deploy's blocks, then build the config, from a changed copy of the deploy where an item asks for it.

    Raises:
        SettingsError: A block is wrong; the server must not start.
    """
    if killed():
        return wrapped(*args, **kwargs)
    try:
        kwargs = _prepared(args, kwargs)
    except SettingsError:
        raise
    except Exception:
        logger.exception("omni_speech_accel: the deploy config could not be judged; the host builds it as it is")
    return wrapped(*args, **kwargs)


def _check_files(path: Path) -> None:
    """Stop at a deploy file that the host cannot read, with its place instead of the host's traceback.

    Raises:
        SettingsError: Content of the wrong shape, or a connector without a name.
    """
    from vllm_omni.config import omni_config

    files = read_chain(path, _load_yaml, Path(omni_config._DEPLOY_DIR))
    for file in files:
        check_shape(file.content, file.path)
    check_connectors(merged(files), str(path))


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
    platform = _platform() if platform is None else platform.lower()
    path = None if deploy_config is None else str(deploy_config)
    known = host_pipelines().get(pipeline or "")
    files: tuple[DeployFile, ...] = ()
    blocks: tuple[str, ...] = ()
    stages: tuple[StageItems, ...] = ()
    graphs: GraphReport | None = None
    refusal = error = ""
    try:
        if path is None and (known is None or known.default_deploy_config_name is None):
            raise ValueError(f"this host has no deploy for the pipeline {pipeline}")
        if path is not None and Path(path).is_file():
            _check_files(Path(path))
        try:
            deploy = _load(known, None, path)
            refusal = _refusal(deploy.config, platform)
        except (AttributeError, KeyError, TypeError) as problem:
            raise SettingsError(f"{path}: the host cannot read it: {type(problem).__name__}: {problem}") from problem
        files, path = deploy.files, deploy.path
        pipeline = pipeline or pipeline_of(files)[0]
        known = host_pipelines().get(pipeline or "")
        _check(deploy, platform, cli, pipeline_stages(known))
        blocks = tuple(block.where for file in files for block in find_blocks(file.content, file.path))
        effective = _effective(deploy.config, platform)
        found = []
        for stage in effective.stages:
            settings = _stage_settings(deploy.config, effective, stage.stage_id, cli)
            on = tuple(key for key in settings.items if settings.enabled(key))
            off = tuple(key for key in settings.items if not settings.enabled(key))
            found.append(StageItems(stage.stage_id, settings.present, on, off))
        stages = tuple(found)
        if pipeline == fish_omni_full_graph.PIPELINE:
            graphs, _ = _graphs(pipeline, deploy, platform, cli)
    except (SettingsError, OSError, ValueError, yaml.YAMLError) as problem:
        error = str(problem)
        judged = fit(patch_for(fish_omni_full_graph.KEY))
        if pipeline == fish_omni_full_graph.PIPELINE and not judged.applies:
            graphs = GraphReport(pipeline, platform, False, False, judged.reason)
    return DeployReport(path, pipeline, platform, tuple(f.path for f in files), blocks, stages, graphs, refusal, error)
