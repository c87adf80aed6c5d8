# SPDX-License-Identifier: Apache-2.0
"""Do two speech servers say the same while their decode batches grow, shrink and change rows, and how fast are they?

`check.run_transitions` compares what they say, `modes.compare_modes` their speed. Imports httpx and numpy only to run.
"""

__all__ = ["CannotCompare"]


class CannotCompare(Exception):
    """The comparison cannot be made as asked. The message says what to do."""
