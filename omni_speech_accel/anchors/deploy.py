# SPDX-License-Identifier: Apache-2.0
"""The anchor on the host's config builder.

The anchor runs in the API server before any stage process starts. It checks
every block of the deploy, those of other stages and in places that the host
ignores included, and lets ``fish_omni_full_graph`` change a copy of the deploy.
Deploys without a block pass through untouched.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omni_speech_accel.deploy.check import check, has_block
from omni_speech_accel.deploy.files import DeployFile, host_reader, read_chain
from omni_speech_accel.deploy.layering import ADDITIONAL
from omni_speech_accel.deploy.pipelines import pipeline_stages
from omni_speech_accel.environment import killed
from omni_speech_accel.items import fish_omni_full_graph
from omni_speech_accel.items.fish_omni_full_graph import GraphReport
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.options import FullGraphOptions
from omni_speech_accel.plugin.settings import BLOCK, Settings, SettingsError, parse_block, resolve
from omni_speech_accel.plugin.table import patch_for

logger = logging.getLogger("vllm.omni_speech_accel")

_OBJECT = "user_deploy_config"


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


def host_platform() -> str | None:
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
    if path is not None and host_reader() is None:
        # Read as plain YAML, a deploy could be refused that the host reads otherwise.
        raise LookupError("this host keeps its YAML reader elsewhere")
    files = () if path is None else read_chain(Path(path), folder)
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


def _connector_extra(deploy: Any, stage_id: int) -> Mapping[str, Any]:
    """The connector ``extra`` that the host hands to a stage: of an edge into it, else of one out of it."""
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config

    try:
        # The host reads connectors from the deploy file, so the platform's overrides do not touch them.
        transfer = load_omni_transfer_config(config_dict=_content(deploy))
    except Exception:
        return {}  # as the host does, which logs it; with a block in a connector the start has been stopped before
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


def _check(deploy: _Deploy, platform: str | None, cli: Mapping[str, Any], pipeline_cfg: Any) -> bool:
    """Check every block, and log what there is to say of them; whether there is one.

    Raises:
        SettingsError: A block is wrong, or reaches no stage.
    """
    found = False
    stages = pipeline_stages(pipeline_cfg)
    # The files first, since a message names a file where it can; the caller's object after them, since the caller may
    # have put a block into it.
    for chain in (deploy.files, (deploy.object_file,) if deploy.given else ()):
        if not has_block(chain):
            continue
        notices = check(chain, platform, stages=stages, pipeline=getattr(pipeline_cfg, "model_type", None)).notices
        for notice in () if found else notices:
            level = logging.WARNING if notice.level == "warning" else logging.INFO
            logger.log(level, "omni_speech_accel: %s", notice.text)
        found = True
    for name, value in cli.items():
        if name.endswith(ADDITIONAL) and isinstance(value, Mapping) and BLOCK in value:
            parse_block(value[BLOCK], f"--{name.replace('_', '-')}.{BLOCK}")
            found = True
    return found


def _graphs(
    pipeline: str, deploy: _Deploy, platform: str | None, cli: Mapping[str, Any]
) -> tuple[GraphReport, Any | None]:
    """The graph item's verdict on a checked deploy."""
    effective = partial(_effective, platform=platform)
    stage = fish_omni_full_graph.STAGE
    settings = _stage_settings(deploy.config, effective(deploy.config), stage, cli)
    options = settings.items.get(fish_omni_full_graph.KEY)
    assert options is None or isinstance(options, FullGraphOptions)
    judged = fit(patch_for(fish_omni_full_graph.KEY), allow_unverified=settings.allow_unverified_host)
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
    platform = host_platform()
    if not _check(deploy, platform, cli, pipeline_cfg):
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
