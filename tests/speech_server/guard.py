# SPDX-License-Identifier: Apache-2.0
"""Runs a command and ends it, with all its children, when whoever started it is gone.

    python guard.py COMMAND ...        # with a pipe as standard input

The other end of the pipe closes when its owner dies, however it dies. A server without this outlives a test run that
was killed, with gigabytes of memory. SIGINT is passed on to the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def kill_when_orphaned() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, lambda *_: command.send_signal(signal.SIGINT))
    threading.Thread(target=kill_when_orphaned, daemon=True).start()
    code = command.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
