# SPDX-License-Identifier: Apache-2.0
"""What a deploy YAML asks for, item by item, for `status`.

Read with plain YAML and the rules of :mod:`omni_speech_accel.deploy.files`, in
milliseconds. What only the host can tell (will it accept the deploy on this
platform, will the graph override apply) is asked of the host for fish_omni,
whose item changes the deploy, and for any deploy where the caller wants it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omni_speech_accel.anchors.explain import DeployReport, explain
from omni_speech_accel.deploy.blocks import Block
from omni_speech_accel.deploy.check import Notice, check
from omni_speech_accel.deploy.files import DeployFile, host_reader, read_chain, stock_folder
from omni_speech_accel.deploy.layering import stage_ids, stage_layers
from omni_speech_accel.deploy.pipelines import host_pipelines, pipeline_of, pipeline_stages
from omni_speech_accel.deploy.profiles import Profile, profile_of
from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.options import ItemOptions
from omni_speech_accel.plugin.settings import SettingsError, resolve
from omni_speech_accel.plugin.table import PATCHES, Patch

_FULL_GRAPH = "fish_omni_full_graph"
_FISH = "fish_omni"
_PLAIN = Notice("warning", "there is no reader of a host here: read as plain YAML, ${...} left as it stands.")


@dataclass(frozen=True)
class Asked:
    """What the deploy says about one item. ``explicit``: a block names it instead of leaving its default."""

    enabled: bool
    explicit: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    unverified_host: bool = False


@dataclass(frozen=True)
class DeployView:
    """A deploy YAML with its bases. ``report``: what the host says to it, where it was asked.

    ``guess``: what ``pipeline`` was guessed from, where no file says it. ``notices``: what the server's log will
    say of blocks that do nothing.
    """

    path: str
    files: tuple[DeployFile, ...]
    pipeline: str | None
    blocks: tuple[Block, ...]
    items: Mapping[str, Asked]
    report: DeployReport | None = None
    guess: str = ""
    notices: tuple[Notice, ...] = ()

    def asked(self, item: str) -> Asked | None:
        """What the deploy says about ``item``; ``None`` where it has no block."""
        return self.items.get(item)

    def obstacle(self, item: str) -> str:
        """Why the host will not let ``item`` act on this deploy, or ``""``."""
        if item != _FULL_GRAPH or self.report is None or self.report.graphs is None:
            return ""
        if self.report.refusal:
            return f"the host will refuse to start: {self.report.refusal}"
        graphs = self.report.graphs
        return "" if graphs.applied or graphs.satisfied else graphs.reason

    def remark(self, item: str) -> str:
        """What there is to say of ``item`` where nothing hinders it, or ``""``."""
        graphs = self.report.graphs if self.report is not None and item == _FULL_GRAPH else None
        return graphs.reason if graphs is not None and graphs.satisfied else ""

    @property
    def profile(self) -> Profile | None:
        """The model's profile, where the pipeline is one that the table knows."""
        return profile_of(self.pipeline)

    @property
    def refusal(self) -> str:
        """What the host will stop with on this platform, or ``""``."""
        return self.report.refusal if self.report is not None else ""


def _find(deploy_config: str | Path, stock: Path) -> Path:
    path = Path(deploy_config)
    for candidate in (path, stock / path.name, stock / f"{path.name}.yaml"):
        if candidate.is_file() and (candidate == path or path.parent == Path(".")):
            return candidate
    return path


def _options(item: ItemOptions) -> dict[str, Any]:
    return item.model_dump(exclude={"enabled"})


def _acts_in(patch: Patch, profile: Profile | None, stages: Sequence[int]) -> Sequence[int]:
    """The stages of a deploy whose settings decide on an item: the one that it acts in, else any."""
    number = profile.acts_in(patch) if profile is not None else None
    return [stage for stage in stages if number is None or stage == number]


def _asked(content: Mapping[str, Any], pipeline: str | None, platform: str) -> dict[str, Asked]:
    """Per item what the stage that it acts in will read: the chain merged as the host does, then the stage's blocks.

    An item that may act in several stages is on where it is on in one.
    """
    layers = {stage: stage_layers(content, stage, platform) for stage in stage_ids(content)}
    found: dict[str, Asked] = {}
    for patch in PATCHES:
        for stage in _acts_in(patch, profile_of(pipeline), list(layers)):
            settings = resolve(*layers[stage])
            known = found.get(patch.key)
            if not settings.present or (known is not None and (known.enabled or not settings.enabled(patch.key))):
                continue
            named = any(isinstance(block, Mapping) and patch.key in block for _, block in layers[stage])
            options = _options(settings.options(patch.key))
            found[patch.key] = Asked(settings.enabled(patch.key), named, options, settings.allow_unverified_host)
    return found


def read_deploy(deploy_config: str | Path, platform: str, *, ask_host: bool = False) -> DeployView:
    """Read a deploy YAML and its ``base_config`` chain.

    Args:
        deploy_config: A path, or the name of a file that the host ships.
        platform: ``cuda``, ``npu`` or ``cpu``.
        ask_host: Let the host judge the deploy too, which imports it; always so for fish_omni.

    Raises:
        FileNotFoundError: A file of the chain is missing.
        SettingsError: A block is wrong, or stands where it reaches no stage.
    """
    path = _find(deploy_config, stock_folder())
    files = read_chain(path)
    pipeline, guess = pipeline_of(files)
    stages = pipeline_stages(host_pipelines().get(pipeline or ""))
    checked = check(files, platform, stages=stages, pipeline=pipeline)
    notices = checked.notices if host_reader() is not None else (*checked.notices, _PLAIN)
    asked = _asked(checked.content, pipeline, platform) if checked.blocks else {}
    view = DeployView(str(path), files, pipeline, checked.blocks, asked, guess=guess, notices=notices)
    # The host refuses some deploys on NPU; which, it alone can tell where the pipeline is unknown.
    unknown = pipeline is None and platform == "npu"
    if host.host_info().location is None or not (ask_host or unknown or pipeline == _FISH):
        return view
    report = explain(path, pipeline=pipeline, platform=platform)
    if report.error:
        raise SettingsError(report.error)
    return replace(view, pipeline=report.pipeline or pipeline, report=report)
