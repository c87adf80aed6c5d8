# SPDX-License-Identifier: Apache-2.0
"""The ``status`` command; what it collects is made in :mod:`omni_speech_accel.cli.status`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from omni_speech_accel.cli.options import (
    Json,
    PlatformName,
)
from omni_speech_accel.cli.output import (
    errors_reported,
    stdout_kept_clean,
)


def _host_platform() -> Any:
    """The platform that the host reports.

    Raises:
        Unavailable: The host cannot be imported.
    """
    from omni_speech_accel.cli.status import detect_platform
    from omni_speech_accel.errors import Unavailable

    try:
        return detect_platform()
    except ImportError as error:
        raise Unavailable(f"--ask-host: vllm-omni cannot be imported here: {error}") from error


def _not_a_file(path: str | None, error: FileNotFoundError) -> OSError:
    """``error``, or what it hides: that a folder has this path."""
    return IsADirectoryError(f"{path} is a folder") if path is not None and Path(path).is_dir() else error


def status(
    deploy_config: Annotated[
        str | None,
        typer.Option("--deploy-config", help="Deploy YAML to judge: a path, or the name of one that the host ships."),
    ] = None,
    platform: Annotated[
        PlatformName, typer.Option(help="Judge for this device; auto guesses from drivers and installed packages.")
    ] = PlatformName.auto,
    ask_host: Annotated[
        bool,
        typer.Option("--ask-host", help="Import vllm-omni (10 s) and let it name the platform and judge the deploy."),
    ] = False,
    as_json: Json = False,
) -> None:
    """What is installed, what applies here, and what a deploy YAML would switch on.

    Reads files and package metadata only, so it is quick and needs no device. For each item: on, off, available or not
    applied and why, and whether the test-suite runs on this host's code ("verified") or only its shape fits ("by
    capability"). Prints the VLLM_PLUGINS value to use, and what in the environment would get in the way.

    Exit code: 0 everything asked for applies; 1 something asked for cannot be had; 2 the deploy YAML is wrong;
    130 interrupted.

    Examples:

        omni-speech-accel status

        omni-speech-accel status --deploy-config my.yaml --json
    """
    from omni_speech_accel.cli import status as module

    with errors_reported(as_json):
        chosen = None
        with contextlib.ExitStack() as stack:
            if ask_host or deploy_config is not None:
                stack.enter_context(stdout_kept_clean())
            if platform is not PlatformName.auto:
                chosen = module.Platform(platform.value, "--platform")
            elif ask_host:
                chosen = _host_platform()
            try:
                found = module.collect(deploy_config, platform=chosen, ask_host=ask_host)
            except FileNotFoundError as error:
                raise _not_a_file(deploy_config, error) from error
    if as_json:
        typer.echo(found.as_json())
    else:
        from omni_speech_accel.cli.tables import print_status

        print_status(found)
    raise typer.Exit(found.exit_code)
