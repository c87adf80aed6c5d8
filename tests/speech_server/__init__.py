# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve --omni`` on a CPU for tests and the demo: model directory, deploy files, server, client."""
