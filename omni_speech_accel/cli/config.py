# SPDX-License-Identifier: Apache-2.0
"""The ``config`` command: a deploy overlay, rendered and checked."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omni_speech_accel.cli.options import (
    Json,
    PlatformName,
    names_in,
    yaml_value,
)
from omni_speech_accel.cli.output import (
    errors_reported,
)
from omni_speech_accel.errors import UsageError

if TYPE_CHECKING:
    from omni_speech_accel.deploy.profiles import Profile


class Place(str, Enum):
    """Where the block may stand in a deploy YAML."""

    additional_config = "additional_config"
    connectors = "connectors"


def _chosen(on: list[str], off: list[str], options: list[str]) -> dict[str, Any]:
    """Items and their values as an overlay takes them.

    Raises:
        UsageError: An item is on and off at once, or an option is not ITEM.KEY=VALUE.
    """
    both = sorted(set(on) & set(off))
    if both:
        raise UsageError(f"{both[0]} is named by --on and by --off")
    chosen: dict[str, Any] = {**dict.fromkeys(on, True), **dict.fromkeys(off, False)}
    for option in options:
        path, separator, value = option.partition("=")
        item, dot, key = path.partition(".")
        if not (separator and dot and item and key):
            raise UsageError(f"--option takes ITEM.KEY=VALUE, not {option!r}")
        if chosen.get(item) is False:
            raise UsageError(f"{item} is off, so --option {option} would do nothing")
        known = chosen.get(item)
        chosen[item] = {**(known if isinstance(known, dict) else {}), key: yaml_value(value, f"--option {path}")}
    return chosen


def _profile(base: str, name: str | None, platform: PlatformName, place: Place | None, stage: int | None) -> Profile:
    """The overlay's profile, by name or by the base's file name, for the devices that it is written for.

    Raises:
        UsageError: No profile fits, or the place cannot be had.
    """
    from dataclasses import replace

    from omni_speech_accel.cli.status import guess_platform
    from omni_speech_accel.deploy.profiles import PROFILES, suggest_profile

    keys = ", ".join(profile.key for profile in PROFILES)
    guessed = guess_platform()
    device = guessed.name if platform is PlatformName.auto else platform.value
    found = next((profile for profile in PROFILES if profile.key == name), None) if name else None
    if found is None and name is None:
        candidates = (suggest_profile(base, known) for known in (device, "cuda", "npu"))
        found = next((profile for profile in candidates if profile is not None), None)
    if found is None:
        raise UsageError(f"no model is known by {name or base}; name one by --profile: {keys}")
    # Not the CPU where a driver is merely missing: an overlay may be written on another machine than the server's.
    cpu = device == "cpu" and name is None and "driver" not in guessed.source
    if platform is not PlatformName.auto or device in found.platforms or cpu:
        found = replace(found, devices=(device,))
    if stage is not None and place is not Place.additional_config:
        raise UsageError("--stage is the stage of --place additional_config, which is not given")
    if place is Place.additional_config:
        wanted = ("stages", found.stage if stage is None else stage, "additional_config")
        return found if wanted == found.place else replace(found, place=wanted, place_note="")
    if place is Place.connectors and found.place[0] == "stages":
        raise UsageError(f"{found.base} has no connectors; the block belongs at stages[].additional_config")
    return found


def config(
    base: Annotated[str, typer.Argument(help="Deploy YAML to build on: the host's, by name or path, or your own.")],
    on: Annotated[str | None, typer.Option(help="Items to switch on, comma separated.")] = None,
    off: Annotated[str | None, typer.Option(help="Items to switch off, comma separated.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="Option of an item, ITEM.KEY=VALUE; may repeat. Example: s3_graph.max_graphs=4"),
    ] = None,
    platform: Annotated[
        PlatformName, typer.Option(help="Device that the deploy is for; auto guesses.")
    ] = PlatformName.auto,
    profile: Annotated[str | None, typer.Option(help="Model and device, where BASE's file name does not tell.")] = None,
    place: Annotated[
        Place | None, typer.Option(help="Where the block stands. Default: where it reaches this model's stages.")
    ] = None,
    stage: Annotated[int | None, typer.Option(help="Stage of --place additional_config.", min=0)] = None,
    as_json: Json = False,
) -> None:
    """Print a deploy overlay over BASE with every item listed and explained, chosen ones on or off.

    Redirect it into a file next to BASE and pass it to `vllm serve --omni --deploy-config`. BASE is written as an
    absolute path where it is the host's, since the host looks for a relative one beside the overlay.

    An item that the device or the installed host cannot have is off, with the reason.

    Exit code: 0 printed; 2 an unknown item or option, or a BASE, stage or place in which no item could act;
    130 interrupted.

    Examples:

        omni-speech-accel config minicpmo_4_5.yaml > my.yaml

        omni-speech-accel config minicpmo_4_5.yaml --off s3_graph --option speaker_graph.max_graphs=4
    """
    from omni_speech_accel.deploy.overlay import check_overlay, render_overlay, replaced, unavailable

    with errors_reported(as_json):
        chosen = _chosen(names_in(on), names_in(off), option or [])
        found = _profile(base, profile, platform, place, stage)
        path = _base_path(base)
        reasons = unavailable(found)
        here = Path(path).is_file()  # without a host, BASE may be a file of the server's
        text = render_overlay(path, found, chosen, reasons, replaced(path, found) if here else {})
        if here:
            check_overlay(text, path, found, asked=profile is not None)
        for item in chosen:
            if chosen[item] is not False and item in reasons:
                typer.echo(f"warning: {item} is switched on and will not be applied: {reasons[item]}", err=True)
    if as_json:
        import yaml

        typer.echo(json.dumps({"profile": found.key, "overlay": yaml.safe_load(text), "text": text}, indent=2))
    else:
        typer.echo(text, nl=False)


def _base_path(base: str) -> str:
    """``base`` as the overlay names it: the host's own file by its full path, any other as it was given.

    Raises:
        IsADirectoryError: It is a folder.
        UsageError: There is no such file, neither here nor, for a bare name, among the host's, or its name cannot
            be written.
    """
    from omni_speech_accel.host import source as host

    path, location = base, host.host_info().location
    bare = Path(base).name == base
    if not Path(base).is_file():
        # The host's loader finds its own files by their bare name, with or without the suffix.
        stock = [location / "deploy" / name for name in (base, f"{base}.yaml")] if location is not None and bare else []
        found = next((candidate for candidate in stock if candidate.is_file()), None)
        if found is not None:
            path = str(found)
        elif Path(base).is_dir():
            raise IsADirectoryError(f"{base} is a folder")
        elif location is not None or not bare:
            raise UsageError(f"{base} does not exist" + (f", here or in {location / 'deploy'}" if location else ""))
    try:
        path.encode()
    except UnicodeEncodeError as error:
        problem = "cannot be read in this locale, or is no UTF-8, so no YAML can hold it; try LC_ALL=C.UTF-8"
        raise UsageError(f"the name {path!r} {problem}") from error
    return path
