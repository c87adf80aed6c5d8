# SPDX-License-Identifier: Apache-2.0
"""What the command line turns into a message and an exit code: what a user can mend, apart from what broke."""

from __future__ import annotations


class UserError(Exception):
    """Whoever asked can mend it, and the message says how."""


class UsageError(UserError):
    """An argument is wrong: an unknown item, a value that is none, two options that exclude each other."""


class Unavailable(UserError):
    """What is asked for is not here: the host, its device, a package, a file of a model."""


class RunError(Exception):
    """A run broke: what it measured, or would have, is not what was asked for."""


class ReferenceMixup(RunError):
    """A stream did not use the reference that it was given."""
