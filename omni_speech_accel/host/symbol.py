# SPDX-License-Identifier: Apache-2.0
"""The name of something that the host defines. Apart from :mod:`.source`: who only registers reads no file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """A host symbol that a patch needs.

    ``parameters`` are the names the patch passes or reads; the host may have
    more only where they have defaults. ``restated`` marks a body that the patch
    restates instead of calling: it fits only where the body is a verified one.
    """

    module: str
    qualname: str
    parameters: tuple[str, ...] | None = None
    restated: bool = False
