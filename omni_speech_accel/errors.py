# SPDX-License-Identifier: Apache-2.0
"""What the command line turns into a message and an exit code instead of a traceback."""

from __future__ import annotations

__all__ = ["BenchError", "ReferenceMixup"]


class BenchError(RuntimeError):
    """The run cannot be made as asked: a missing model, platform, package or item. The message says what to do."""


class ReferenceMixup(BenchError):
    """A stream did not use the reference that it was given, so whatever was measured is not what was asked for."""
