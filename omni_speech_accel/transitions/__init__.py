# SPDX-License-Identifier: Apache-2.0
"""Do two speech servers say the same while their decode batches grow, shrink and change rows?

`register` adds the command. The check itself (`check.run_transitions`) loads httpx and numpy only when it runs.
"""

from omni_speech_accel.transitions.command import register

__all__ = ["register"]
