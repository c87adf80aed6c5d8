# SPDX-License-Identifier: Apache-2.0
"""Torch models that this package builds itself from the files a host ships."""
