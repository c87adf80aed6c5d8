# SPDX-License-Identifier: Apache-2.0
"""Drives the stock speech stage in this process: `verify`, `bench` and `ab`.

Importing this package imports neither torch nor the host.
"""
