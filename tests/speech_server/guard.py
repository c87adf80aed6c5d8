# SPDX-License-Identifier: Apache-2.0
"""Runs a command and ends it, with all its children, when whoever started it is gone.

    python guard.py COMMAND ...        # with a pipe as standard input

The other end of the pipe closes when its owner dies, however it dies. A server without this outlives a test run that
was killed, with gigabytes of memory. It is asked first (SIGINT), so that it can give its shared memory back, and
killed 20 s later. SIGINT is passed on to the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

PATIENCE = 20.0


def end_when_orphaned(command: subprocess.Popen[bytes]) -> None:
    os.read(sys.stdin.fileno(), 1)
    command.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(PATIENCE)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, lambda *_: command.send_signal(signal.SIGINT))
    threading.Thread(target=end_when_orphaned, args=(command,), daemon=True).start()
    code = command.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
