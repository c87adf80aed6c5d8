# SPDX-License-Identifier: Apache-2.0
"""``fish_omni_full_graph``: the fish_omni decode step replays one full graph per batch size on NPU.

Why: stage 0 samples one audio frame per stream and step, out of 53 layers of
small kernels. Asked for PIECEWISE, an NPU launches the decode step kernel by
kernel; the reference thread measured, on its NPU and one stream, 17.3 frames/s
so and 22.4 to 22.9 with FULL_AND_PIECEWISE. Mixed steps keep their piecewise
graphs.

How: no host function is replaced. While the host builds its config, stage 0's
graph settings are changed on a copy of the deploy config, in the place that
wins there. The order of precedence with the item on is: the command line, the
user's deploy files, this item, the host's own deploy files.

Sizes: those that the host lists for the stage, up to ``max_num_seqs``, and
``max_num_seqs`` itself; a decode step has one row per stream, so a full graph
above it is never replayed. The sizes serve both modes, so the cap also takes
the piecewise graphs of larger prefill and mixed batches away;
``keep_piecewise_above`` keeps those that the host would have captured.

Retire: when the host's own deploy file asks for this on NPU. The item then
finds nothing to change and says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from omni_speech_accel.deploy.files import DeployFile
from omni_speech_accel.plugin.options import FullGraphOptions

KEY = "fish_omni_full_graph"
PIPELINE = "fish_omni"
STAGE = 0
PLATFORM = "npu"
MODE = "FULL_AND_PIECEWISE"

_COMPILATION = "compilation_config"
_EAGER = "enforce_eager"
_SIZES = "cudagraph_capture_sizes"
_MAX_SIZE = "max_cudagraph_capture_size"
_STREAMS = "max_num_seqs"
_TOKENS = "max_num_batched_tokens"
_GRAPH_KEYS = (_COMPILATION, _EAGER, _SIZES, _MAX_SIZE)
# A lower optimization level on the command line means other graphs than the deploy file's, too.
_CLI_KEYS = (*_GRAPH_KEYS, "optimization_level")

_BOOL: TypeAdapter[bool] = TypeAdapter(bool)
_INT: TypeAdapter[int] = TypeAdapter(int)

_DEFAULT_MAX_SIZE = 512
"""vllm.config.VllmConfig._set_cudagraph_sizes: the ceiling of the default sizes outside one CUDA family."""


@dataclass(frozen=True)
class GraphReport:
    """What the item does to one deploy, or why it does nothing.

    ``satisfied``: nothing is changed because the host's own deploy asks for the same.

    ``mode_*`` is ``None`` and ``sizes_*`` is ``None`` where the deploy leaves
    the choice to vLLM. ``user_settings`` names what the user set by hand for
    this stage's graphs, the strongest first; any of them wins over the item.
    """

    pipeline: str | None
    platform: str | None
    asked: bool
    applied: bool
    reason: str
    mode_before: str | None = None
    mode_after: str | None = None
    sizes_before: tuple[int, ...] | None = None
    sizes_after: tuple[int, ...] | None = None
    max_num_seqs: int | None = None
    user_settings: tuple[str, ...] = ()
    satisfied: bool = False
    item: str = KEY
    stage: int = STAGE

    def line(self) -> str:
        """One line for a log or a terminal."""
        head = f"{self.item}: {self.pipeline} stage {self.stage} on {self.platform}: "
        if not self.applied:
            return head + ("nothing to change: " if self.satisfied else "not applied: ") + self.reason
        return head + (
            f"{self.mode_before or 'no mode set'} -> {self.mode_after}, capture sizes "
            f"{_span(self.sizes_before)} -> {_span(self.sizes_after)}"
        )


def _span(sizes: tuple[int, ...] | None) -> str:
    if not sizes:
        return "vLLM's own"
    return f"{len(sizes)} up to {max(sizes)}"


def default_sizes(largest: int) -> tuple[int, ...]:
    """vLLM's capture grid up to ``largest`` rows: 1, 2, 4, eights below 256, sixteens from there."""
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]  # VllmConfig._set_cudagraph_sizes
    return tuple(size for size in grid if size <= largest)


def capture_sizes(
    max_num_seqs: int,
    listed: tuple[int, ...] | None,
    fallback: tuple[int, ...] | None = None,
    keep_above: bool = False,
    max_size: int | None = None,
    max_tokens: int | None = None,
) -> tuple[int, ...]:
    """Capture sizes in rows, ascending.

    Args:
        max_num_seqs: Streams of the stage; the largest full decode graph.
        listed: Sizes that stock would capture, ``None`` where it leaves them to vLLM.
        fallback: A grid to take the sizes up to ``max_num_seqs`` from where none is listed.
        keep_above: Keep the sizes above ``max_num_seqs`` that stock would capture.
        max_size: The ceiling that stock sets where it lists no sizes.
        max_tokens: The stage's ``max_num_batched_tokens``; no larger size is ever captured.
    """
    grid = listed or fallback or default_sizes(max_num_seqs)
    sizes = {size for size in grid if size <= max_num_seqs} | {max_num_seqs}
    if keep_above:
        ceiling = max_size or min(2 * max_num_seqs, _DEFAULT_MAX_SIZE)
        full = (max_tokens,) if max_tokens and max_tokens <= ceiling else ()  # vLLM captures a full step as well
        stock = listed or (*default_sizes(ceiling), *full)
        sizes |= {size for size in stock if max_num_seqs < size <= (max_tokens or size)}
    return tuple(sorted(sizes))


def _entries(content: Mapping[str, Any], platform: str | None) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """``(scope, place, entry)`` of stage 0's entries in a deploy file; scope is ``platform`` or ``stage``."""
    section = (content.get("platforms") or {}).get(platform) or {}
    for scope, place, stages in (
        ("platform", f"platforms.{platform}.stages", section.get("stages")),
        ("stage", "stages", content.get("stages")),
    ):
        for entry in stages or ():
            if entry.get("stage_id") == STAGE:
                yield scope, f"{place}[{STAGE}]", entry


def _holders(
    scope: str, entry: Mapping[str, Any], arguments_alone: bool = False
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The mappings of an entry that the host reads: of a platform's entry with ``engine_args``, these alone.

    ``arguments_alone``: another file of the chain gives the platform's entry ``engine_args``.
    """
    nested = {name: entry[name] for name in ("engine_args", "engine_extras") if isinstance(entry.get(name), Mapping)}
    if scope == "platform" and (arguments_alone or "engine_args" in nested):
        arguments = nested.get("engine_args", {})
        yield ".engine_args", arguments
        if isinstance(arguments.get("engine_extras"), Mapping):
            yield ".engine_args.engine_extras", arguments["engine_extras"]
        return
    yield "", entry
    for name, holder in nested.items():
        yield f".{name}", holder


def _graph_keys(
    content: Mapping[str, Any], platform: str | None, arguments_alone: bool
) -> dict[tuple[str, str, str], Any]:
    """``{(scope, place, key): value}`` of the graph settings that a deploy file makes for stage 0; a null sets none."""
    return {
        (scope, f"{place}{nested}.{key}", key): holder[key]
        for scope, place, entry in _entries(content, platform)
        for nested, holder in _holders(scope, entry, arguments_alone)
        for key in _GRAPH_KEYS
        if holder.get(key) is not None
    }


def _flag(value: Any) -> bool:
    """A switch as the host reads it: ``"false"`` is false."""
    try:
        return value is not None and _BOOL.validate_python(value)
    except ValidationError:
        return bool(value)  # the host will refuse it


def _number(value: Any) -> int | None:
    """A number as the host reads it: ``"16"`` is 16. ``None`` where it is none."""
    try:
        return None if value is None else _INT.validate_python(value)
    except ValidationError:
        return None


def _chooses(key: str, value: Any) -> bool:
    """``enforce_eager: false`` asks for graphs and leaves open which, a null sets nothing; the rest is a choice."""
    return _flag(value) if key == _EAGER else value is not None


@dataclass(frozen=True)
class _User:
    """The user's own graph settings: ``(key, name)`` of the command line's and the files' choices, keys per scope."""

    cli: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    stage_keys: frozenset[str]
    platform_keys: frozenset[str]


def _user(
    files: tuple[DeployFile, ...],
    cli: Mapping[str, Any],
    platform: str | None,
    baseline: Mapping[str, Any] | None,
    platforms: Mapping[str, Any] | None,
) -> _User:
    flags = tuple(
        f"--{name.replace('_', '-')}"
        for key in _CLI_KEYS
        for name in (f"stage_{STAGE}_{key}", key)
        if cli.get(name) is not None and _chooses(key, _cli_value(cli, key))
    )
    choices: list[tuple[str, str]] = []
    merged = _entries({"platforms": platforms}, platform)
    arguments_alone = any("engine_args" in entry for _, _, entry in merged)
    stock = _graph_keys(baseline or {}, platform, arguments_alone)
    keys: dict[str, set[str]] = {"stage": set(), "platform": set()}
    for number, file in enumerate(files):
        if file.stock:
            continue
        for where, value in _graph_keys(file.content, platform, arguments_alone).items():
            if number == 0 and baseline is not None and stock.get(where) == value:
                continue
            scope, place, key = where
            keys[scope].add(key)
            if _chooses(key, value):
                choices.append((key, f"{file.path}: {place}"))
    return _User(flags, tuple(choices), frozenset(keys["stage"]), frozenset(keys["platform"]))


def _stage_of(deploy: Any) -> Any:
    return next((stage for stage in deploy.stages if stage.stage_id == STAGE), None)


def _value(stage: Any, key: str) -> Any:
    """A stage's own value as the host reads it: its extras override its fields."""
    return stage.engine_extras.get(key, getattr(stage, key, None))


def _drop_platform_keys(deploy: Any, platform: str | None, keys: frozenset[str]) -> None:
    for scope, _, entry in _entries({"platforms": deploy.platforms}, platform):
        if scope == "platform":
            for _, holder in _holders(scope, entry):
                for key in keys:
                    holder.pop(key, None)  # type: ignore[attr-defined]


def _cli_value(cli: Mapping[str, Any], key: str) -> Any:
    """The command line's value for stage 0; the host lets the later of the two spellings win."""
    found = None
    for name, value in cli.items():
        if name in (key, f"stage_{STAGE}_{key}") and value is not None:
            found = value
    return found


def _starts_with(stage: Any, cli: Mapping[str, Any], key: str) -> Any:
    """The value that the stage starts with, the command line included."""
    over = _cli_value(cli, key)
    return _value(stage, key) if over is None else over


def _compilation(stage: Any, cli: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stage's compilation config as a mapping; a config object of the caller's replaces the deploy's."""
    own, over = _value(stage, _COMPILATION), _cli_value(cli, _COMPILATION)
    if over is not None and not isinstance(over, Mapping):
        return {key: getattr(over, key, None) for key in ("cudagraph_mode", _SIZES, _MAX_SIZE)}
    return {**(own if isinstance(own, Mapping) else {}), **(over or {})}


def _view(stage: Any, cli: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """Mode and sizes that the stage starts with, the command line included."""
    if _flag(_starts_with(stage, cli, _EAGER)):
        return "NONE", ()
    config = _compilation(stage, cli)
    mode = config.get("cudagraph_mode")
    sizes = _cli_value(cli, _SIZES) or config.get(_SIZES)
    numbers = None if sizes is None else tuple(int(size) for size in sizes)
    return None if mode is None else getattr(mode, "name", str(mode)), numbers


def _listed(config: Any) -> tuple[int, ...] | None:
    sizes = config.get(_SIZES) if isinstance(config, Mapping) else None
    return tuple(int(size) for size in sizes) if sizes else None


def plan(
    *,
    pipeline: str,
    platform: str | None,
    deploy: Any,
    effective: Callable[[Any], Any],
    options: FullGraphOptions | None,
    files: tuple[DeployFile, ...] = (),
    cli: Mapping[str, Any] | None = None,
    baseline: Mapping[str, Any] | None = None,
    unfit: str = "",
) -> tuple[GraphReport, Any | None]:
    """What the item does to ``deploy`` of the pipeline :data:`PIPELINE`, and the changed copy (``None``: no change).

    Args:
        pipeline: The host's pipeline key, for the report.
        platform: The host's platform name, lower case.
        deploy: The host's deploy config, before platform overrides; never changed.
        effective: Gives a copy of a deploy config with the platform's overrides applied, as the host applies them.
        options: The item's options at stage 0, ``None`` where its block is absent.
        files: The deploy files, the overlay first.
        cli: The host's ``cli_overrides``.
        baseline: What the first of ``files`` was made from; given where that stands for a caller's config
            object, so that only what differs counts as set by the caller.
        unfit: Why the item does not fit this host, or ``""``.
    """
    cli = cli or {}
    asked = options is not None and options.enabled

    def no(reason: str, **more: Any) -> GraphReport:
        return GraphReport(pipeline, platform, asked, False, reason, **more)

    if not asked:
        return no("switched off" if options is not None else "no omni_speech_accel block reaches the stage"), None
    assert options is not None
    if unfit:
        return no(unfit), None
    if platform != PLATFORM:
        return no(f"for {PLATFORM}, not {platform}"), None
    if _stage_of(deploy) is None:
        return no(f"the deploy has no stage {STAGE}"), None

    stock = _stage_of(effective(deploy))
    mode, sizes = _view(stock, cli)
    user = _user(files, cli, platform, baseline, deploy.platforms)
    max_num_seqs = _number(_starts_with(stock, cli, _STREAMS))
    seen: dict[str, Any] = {
        "mode_before": mode,
        "mode_after": mode,
        "sizes_before": sizes,
        "sizes_after": sizes,
        "max_num_seqs": max_num_seqs,
    }
    edited = copy.deepcopy(deploy)
    # The host lets a platform block win over stages[]: without this a setting
    # of the user's would lose to the host's own platform block.
    promoted = user.stage_keys - user.platform_keys
    _drop_platform_keys(edited, platform, promoted)
    ours = _stage_of(effective(edited))
    # A file's choice that a stronger place takes back is none any more.
    choices = user.cli + tuple(name for key, name in user.files if _chooses(key, _starts_with(ours, cli, key)))
    seen["user_settings"] = choices
    if choices:
        seen["mode_after"], seen["sizes_after"] = _view(ours, cli)
        return no(f"the user's own setting wins ({choices[0]})", **seen), edited if promoted else None
    if _flag(_starts_with(ours, cli, _EAGER)):
        return no(f"the host's deploy runs the stage eager ({_EAGER}: true)", **seen), None
    if max_num_seqs is None:
        return no("max_num_seqs is set neither in the deploy nor on the command line", **seen), None

    config = _compilation(stock, cli)
    max_tokens = _number(_starts_with(stock, cli, _TOKENS))
    wanted = capture_sizes(
        max_num_seqs,
        _listed(config),
        _listed(_value(_stage_of(deploy), _COMPILATION)),
        options.keep_piecewise_above,
        _number(_starts_with(stock, cli, _MAX_SIZE) or config.get(_MAX_SIZE)),
        max_tokens,
    )
    if mode == MODE and sizes is not None and tuple(sorted(sizes)) == wanted:
        return no("the host's deploy asks for the same already", satisfied=True, **seen), None
    stage = _stage_of(edited)
    _drop_platform_keys(edited, platform, frozenset({_COMPILATION, _SIZES, _MAX_SIZE}))
    for key in (_COMPILATION, _SIZES, _MAX_SIZE):
        stage.engine_extras.pop(key, None)
    stage.compilation_config = {
        **copy.deepcopy(dict(config)),
        "cudagraph_mode": MODE,
        _SIZES: list(wanted),
        _MAX_SIZE: wanted[-1],
    }
    if wanted[-1] > max_num_seqs and max_tokens is None:
        # vLLM drops sizes above its own token budget, and stops where the largest left is not the one set here.
        del stage.compilation_config[_MAX_SIZE]
    seen["mode_after"], seen["sizes_after"] = _view(_stage_of(effective(edited)), cli)
    return GraphReport(pipeline, platform, asked, True, "", **seen), edited
