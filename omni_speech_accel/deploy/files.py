# SPDX-License-Identifier: Apache-2.0
"""A deploy YAML and its ``base_config`` chain, read as the host reads them.

The host's reader resolves interpolations, merge keys and tabs in ways of its
own, so its own module is used, loaded from its file: the host package as a
whole takes ten seconds to import, and ``status`` answers in one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from omni_speech_accel.host import source as host
from omni_speech_accel.plugin.settings import SettingsError

_BASE = "base_config"


@dataclass(frozen=True)
class DeployFile:
    """One file of a ``base_config`` chain. ``stock``: it lies in the host's installed deploy folder."""

    path: str
    content: Mapping[str, Any]
    stock: bool


def stock_folder() -> Path:
    """The host's own deploy folder; a path that does not exist where no host is installed."""
    return (host.host_info().location or Path("/nonexistent")) / "deploy"


@lru_cache(maxsize=1)
def host_reader() -> Callable[[Path], Any] | None:
    """The host's YAML reader; ``None`` where no host is installed or it keeps its reader elsewhere."""
    location = host.host_info().location
    path = location / "config" / "yaml_util.py" if location is not None else None
    if path is None or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("omni_speech_accel_host_yaml_util", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        load, to_dict = module.load_yaml_config, module.to_dict
    except (ImportError, AttributeError):
        return None
    return lambda file: to_dict(load(file))


def _plain(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def load_file(path: Path) -> Mapping[str, Any]:
    """A deploy file's content, its interpolations resolved; as plain YAML where there is no :func:`host_reader`.

    Raises:
        SettingsError: It is no YAML that the host could read as a deploy.
    """
    try:
        content = (host_reader() or _plain)(path)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is no valid YAML: {error}") from error
    except Exception as error:  # OmegaConf's errors share no other base
        raise SettingsError(f"{path} cannot be read as the host reads it: {error}") from error
    if content is not None and not isinstance(content, Mapping):
        raise SettingsError(f"{path} holds no mapping")
    return content or {}


def read_chain(path: Path, folder: Path | None = None) -> tuple[DeployFile, ...]:
    """The deploy file ``path`` and its bases, the overlay first.

    A relative ``base_config`` is looked for beside the file that names it, as
    the host does.

    Args:
        path: The uppermost file.
        folder: The host's deploy folder; default: the installed one.

    Raises:
        FileNotFoundError: A file of the chain is missing; the message names who asked for it.
        SettingsError: The chain runs in a circle, or a file cannot be read.
    """
    files: list[DeployFile] = []
    seen: set[Path] = set()
    stock_root = (folder or stock_folder()).resolve()
    asked_by = ""
    while True:
        real = path.resolve()
        if not real.is_file():
            beside = stock_root / path.name
            hint = f"; the host has one at {beside}: name it by that path" if asked_by and beside.is_file() else ""
            raise FileNotFoundError(f"{asked_by}{path} does not exist{hint}")
        if real in seen:
            raise SettingsError(f"{asked_by}{path} closes a circle of {_BASE} files")
        seen.add(real)
        content = load_file(path)
        files.append(DeployFile(str(path), content, real.is_relative_to(stock_root)))
        base = content.get(_BASE)
        if base is None:
            return tuple(files)
        asked_by = f"{path}: {_BASE}: "
        path = path.parent / str(base)


def check_shape(content: Mapping[str, Any], file: str) -> None:
    """Stop at what neither the host nor this package can read as a deploy: a list for a mapping, a stage without id.

    Raises:
        SettingsError: The first such place, with its file.
    """
    for name, connector in _mapping(content, "connectors", file).items():
        _whole(connector, f"connectors.{name}", file)
        _mapping(connector, "extra", file, f"connectors.{name}", null=False)
    _check_stages(content, "", file)
    for name in _mapping(content, "platforms", file):
        _check_stages(_mapping(content["platforms"], name, file, "platforms"), f"platforms.{name}", file)


def _wrong(file: str, place: str, wanted: str, value: Any) -> SettingsError:
    return SettingsError(f"{file}: {place} must be {wanted}, not {value!r}")


def _whole(value: Any, place: str, file: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(file, place, "a mapping", value)
    return value


def _mapping(node: Mapping[str, Any], key: Any, file: str, at: str = "", *, null: bool = True) -> Mapping[str, Any]:
    """The mapping ``node[key]``, empty where there is none; ``null``: whether it may be null."""
    if key not in node or (null and node[key] is None):
        return {}
    return _whole(node[key], f"{at}.{key}" if at else str(key), file)


def _check_stages(node: Mapping[str, Any], at: str, file: str) -> None:
    place = f"{at}.stages" if at else "stages"
    stages = node.get("stages")
    if stages is None:
        return
    if not isinstance(stages, list):
        raise _wrong(file, place, "a list", stages)
    for index, stage in enumerate(stages):
        where = f"{place}[{index}]"
        if "stage_id" not in _whole(stage, where, file):
            raise SettingsError(f"{file}: {where} has no stage_id")
        _mapping(stage, "engine_extras", file, where, null=not at)
        for side in ("input_connectors", "output_connectors"):
            for key, connector in _mapping(stage, side, file, where).items():
                if not isinstance(connector, str):
                    edge = f"{where}.{side}.{key}"
                    _mapping(_whole(connector, edge, file), "extra", file, edge, null=False)
        for key in ("engine_args", "runtime"):
            _mapping(stage, key, file, where, null=False)
        for holder in (stage, stage.get("engine_args") or {}, stage.get("engine_extras") or {}):
            config = holder.get("compilation_config")
            sizes = config.get("cudagraph_capture_sizes") if isinstance(config, Mapping) else None
            listed = isinstance(sizes, list) and all(isinstance(size, int | str) for size in sizes)
            if sizes is not None and not listed:
                raise _wrong(file, f"{where}.compilation_config.cudagraph_capture_sizes", "a list of numbers", sizes)
