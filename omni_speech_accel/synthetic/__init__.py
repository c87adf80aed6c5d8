# SPDX-License-Identifier: Apache-2.0
"""Random-weight speech model directories and real-speech references, for benches and tests.

No checkpoint can be downloaded by a test, so :func:`write_checkpoint` makes one from a seed that the stock host loads
with ``strict=True``. Its audio is noise with the right shape and cost; its numbers are healthy, so that a wrong result
shows. :func:`reference_wavs` cuts distinct references out of the speech that ships with the host.
"""

from omni_speech_accel.synthetic.checkpoint import CheckpointInfo, Size, read_checkpoint_info, write_checkpoint
from omni_speech_accel.synthetic.references import reference_wavs, varied_reference_wavs

__all__ = [
    "CheckpointInfo",
    "Size",
    "read_checkpoint_info",
    "reference_wavs",
    "varied_reference_wavs",
    "write_checkpoint",
]
