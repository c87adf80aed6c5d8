# SPDX-License-Identifier: Apache-2.0
"""Record the fingerprints of every host symbol that the table names, for the host installed here.

    python tools/fingerprints.py            # add this host's fingerprints to fingerprints.json
    python tools/fingerprints.py --check    # exit 1 where one is missing

Run it on a host only after the test-suite has passed there: an entry says "verified".
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from omni_speech_accel.host.source import fingerprint, host_info, verified_fingerprints
from omni_speech_accel.plugin.table import PATCHES

FILE = Path(__file__).resolve().parent.parent / "omni_speech_accel" / "host" / "fingerprints.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    version = host_info().version
    if version is None:
        print("vllm-omni is not installed here", file=sys.stderr)
        return 2
    table = verified_fingerprints()
    missing = 0
    for patch in PATCHES:
        for symbol in {*patch.symbols, *(hook.symbol for hook in patch.hooks)}:
            digest = fingerprint(symbol.module, symbol.qualname)
            if digest is None:
                continue
            versions = table.setdefault(f"{symbol.module}:{symbol.qualname}", {}).setdefault(digest, [])
            if version not in versions:
                missing += 1
                versions.append(version)
                versions.sort()
    if check:
        print(f"{missing} fingerprints of vllm-omni {version} are not recorded")
        return 1 if missing else 0
    ordered = {key: dict(sorted(table[key].items())) for key in sorted(table)}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    print(f"{missing} fingerprints of vllm-omni {version} added")
    return 0


if __name__ == "__main__":
    sys.exit(main())
