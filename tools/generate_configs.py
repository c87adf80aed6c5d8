# SPDX-License-Identifier: Apache-2.0
"""Write configs/ from the patch table.

    python tools/generate_configs.py            # write
    python tools/generate_configs.py --check    # exit 1 where a file differs from the table

The host looks for a relative ``base_config`` beside the overlay, and these
files lie outside its ``deploy/`` folder, so the folder is taken from the
environment variable OMNI_DEPLOY_DIR. ``omni-speech-accel config`` writes the
same overlay with the installed host's path in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omni_speech_accel.deploy.overlay import render_graph_mode_overlay, render_overlay
from omni_speech_accel.deploy.profiles import PROFILES
from omni_speech_accel.items.fish_omni_full_graph import MODE, capture_sizes

FOLDER = Path(__file__).resolve().parent.parent / "configs"
DEPLOY_DIR = "OMNI_DEPLOY_DIR"
STREAMS = 64  # the reference thread's max_num_seqs
HEAD = f"""\
# Made by tools/generate_configs.py from the patch table; do not edit.
# {DEPLOY_DIR} names the host's folder of deploy files:
#   export {DEPLOY_DIR}=$(python -c 'import importlib.util as u; \\
#     print(u.find_spec("vllm_omni").submodule_search_locations[0] + "/deploy")')
"""
COMPARISON = (
    "One arm of the PIECEWISE / full-graph comparison for fish_omni stage 0 on NPU. The two files differ in "
    "cudagraph_mode alone; neither has an omni_speech_accel block.",
    "They need a host that serves fish_omni on NPU. vllm-omni 0.32.0rc1 does not: its stage 0 asks for model runner "
    "v2, which it refuses on NPU, and under v1 nothing fills the model's per-step buffers (its state object is made "
    "for v2 only), so no runner is forced here.",
)


def base_config(name: str) -> str:
    """``base_config`` of a file in configs/."""
    return f"${{oc.env:{DEPLOY_DIR}}}/{name}"


def render_all() -> dict[str, str]:
    """``{file name: text}`` of every file in configs/."""
    files = {f"{profile.key}.yaml": render_overlay(base_config(profile.base), profile) for profile in PROFILES}
    for arm, mode in (("piecewise", "PIECEWISE"), ("full", MODE)):
        files[f"fish_omni_npu_{arm}.yaml"] = render_graph_mode_overlay(
            base_config("fish_omni.yaml"), mode, capture_sizes(STREAMS, None), COMPARISON
        )
    return {name: HEAD + text for name, text in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    check = parser.parse_args().check
    wanted = render_all()
    stale = [
        name
        for name, text in wanted.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    stray = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name not in wanted)
    if check:
        for name in [*stale, *stray]:
            print(f"configs/{name} is not what the table makes: run python tools/generate_configs.py")
        return 1 if stale or stray else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        print(f"configs/{name}")
    for name in stray:
        print(f"configs/{name} is no file of this tool", file=sys.stderr)
    return 1 if stray else 0


if __name__ == "__main__":
    sys.exit(main())
