# SPDX-License-Identifier: Apache-2.0
"""The accelerator seam: streams, events, pinned staging and the graph cache, for CUDA, NPU and the host.

No module outside this package names a device library; `accelerator_for(device)` is the way in.
"""

from omni_speech_accel.runtime.accelerator import Accelerator, CapturedGraph
from omni_speech_accel.runtime.backends import accelerator_for, register_backend, unregister_backend
from omni_speech_accel.runtime.counters import Counters, PlainCounters
from omni_speech_accel.runtime.errors import RuntimeSetupError
from omni_speech_accel.runtime.graph_cache import GraphCache
from omni_speech_accel.runtime.staging import PinnedStager, upload
from omni_speech_accel.runtime.streams import PrivateStream

__all__ = [
    "Accelerator",
    "CapturedGraph",
    "Counters",
    "GraphCache",
    "PinnedStager",
    "PlainCounters",
    "PrivateStream",
    "RuntimeSetupError",
    "accelerator_for",
    "register_backend",
    "unregister_backend",
    "upload",
]
