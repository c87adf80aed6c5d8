# SPDX-License-Identifier: Apache-2.0
"""Faster speech from stock vllm-omni (MiniCPM-o 4.5, Step-Audio 2, Fish Drama 3), patched at import time.

Importing this package imports nothing else: ``vllm.general_plugins`` loads
:mod:`omni_speech_accel.plugin` in every vLLM process, the API server included.
"""

__version__ = "0.1.0"
