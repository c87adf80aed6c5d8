# SPDX-License-Identifier: Apache-2.0
"""Errors of the accelerator seam."""

from __future__ import annotations


class RuntimeSetupError(RuntimeError):
    """The device runtime is set up so that a graph capture cannot be right.

    It names the setting to change and must reach the operator: nothing in this package turns it into an eager
    fallback, because a server that quietly runs without its graphs is the harder fault to find.
    """
