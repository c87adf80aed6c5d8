# SPDX-License-Identifier: Apache-2.0
"""``python -m omni_speech_accel``: the ``omni-speech-accel`` command."""

from omni_speech_accel.cli.app import main

if __name__ == "__main__":
    main()
