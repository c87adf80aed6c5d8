# SPDX-License-Identifier: Apache-2.0
"""Write what is made from the patch table: the tables of README.md, docs/items.md, configs/, and fingerprints.json.

    python tools/generate.py                   # write README.md, docs/items.md and configs/
    python tools/generate.py --fingerprints    # and the fingerprints of the host symbols of the host installed here
    python tools/generate.py --check           # write nothing; exit 1 where a file differs

Record a host's fingerprints only after the test-suite has passed there: an entry says "verified".

The host looks for a relative ``base_config`` beside the overlay, and configs/ lies outside its ``deploy/`` folder, so
that folder is taken from the environment variable OMNI_DEPLOY_DIR. ``omni-speech-accel config`` writes the same overlay
with the installed host's path in it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from omni_speech_accel.deploy.overlay import render_graph_mode_overlay, render_overlay
from omni_speech_accel.deploy.profiles import PROFILES
from omni_speech_accel.host.source import fingerprint, host_info, verified_fingerprints
from omni_speech_accel.items.fish_omni_full_graph import MODE, capture_sizes
from omni_speech_accel.plugin.table import PATCHES, Patch

ROOT = Path(__file__).resolve().parent.parent
STACKS = ROOT / "omni_speech_accel" / "host" / "stacks.json"
FINGERPRINTS = STACKS.with_name("fingerprints.json")
CONFIGS = ROOT / "configs"
DEPLOY_DIR = "OMNI_DEPLOY_DIR"
STREAMS = 64  # the reference thread's max_num_seqs
HEAD = f"""\
# Made by tools/generate.py from the patch table; do not edit.
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


def hosts() -> list[str]:
    """Verified vllm-omni versions, newest first as in stacks.json."""
    return list(json.loads(STACKS.read_text(encoding="utf-8"))["stacks"])


def applies(patch: Patch, version: str) -> bool:
    """Whether every symbol that the item needs is recorded for ``version``."""
    table = verified_fingerprints()
    return all(
        any(version in versions for versions in table.get(f"{symbol.module}:{symbol.qualname}", {}).values())
        for symbol in patch.symbols
    )


def mark(patch: Patch, version: str) -> str:
    """What README says of an item on a verified host."""
    if not applies(patch, version):
        return "not applied"
    return "the host refuses the model" if version in patch.refused_on else "yes"


def items_table() -> str:
    rows = ["| item | what it does | where | result against stock |", "|---|---|---|---|"]
    rows += [f"| `{patch.key}` | {patch.summary} | {patch.where} | {patch.against_stock} |" for patch in PATCHES]
    return "\n".join(rows)


def hosts_table() -> str:
    versions = hosts()
    rows = ["| item | devices | " + " | ".join(versions) + " |", "|---|---|" + "---|" * len(versions)]
    for patch in PATCHES:
        marks = [mark(patch, version) for version in versions]
        rows.append(f"| `{patch.key}` | {', '.join(patch.platforms)} | " + " | ".join(marks) + " |")
    return "\n".join(rows)


def options_of(patch: Patch) -> str:
    fields = [
        f"`{name}` (default {json.dumps(field.default)}): {field.description}"
        for name, field in patch.options.model_fields.items()
        if field.description
    ]
    return "; ".join(fields) or "none"


def items_page() -> str:
    parts = [
        "# The items",
        "",
        "Made by `tools/generate.py` from the patch table; do not edit.",
        "",
    ]
    for patch in PATCHES:
        hooks = [f"`{hook.symbol.qualname}`" for hook in patch.hooks]
        default = "on" if patch.default else "off"
        parts += [
            f"## `{patch.key}`",
            "",
            patch.summary,
            "",
            f"- **Why**: {patch.why}",
            f"- **Against stock**: {patch.against_stock}",
            f"- **Acts in**: {patch.where}; on {', '.join(patch.platforms)}; default {default}",
            f"- **Options**: {options_of(patch)}",
            f"- **Wraps**: {', '.join(hooks) or 'nothing; the deploy config is edited before it is used'}",
            f"- **May go**: {patch.retire}",
            f"- **Upstream**: <{patch.upstream}>",
            "",
        ]
    return "\n".join(parts)


def replace_section(text: str, name: str, body: str) -> str:
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no section {name}")
    return pattern.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text)


def pages() -> dict[Path, str]:
    """The text of every page that has something of the table in it."""
    readme = ROOT / "README.md"
    text = replace_section(readme.read_text(encoding="utf-8"), "items", items_table())
    return {readme: replace_section(text, "hosts", hosts_table()), ROOT / "docs" / "items.md": items_page()}


def base_config(name: str) -> str:
    """``base_config`` of a file in configs/."""
    return f"${{oc.env:{DEPLOY_DIR}}}/{name}"


def configs() -> dict[Path, str]:
    """The text of every file in configs/."""
    files = {profile.key: render_overlay(base_config(profile.base), profile) for profile in PROFILES}
    for arm, mode in (("piecewise", "PIECEWISE"), ("full", MODE)):
        files[f"fish_omni_npu_{arm}"] = render_graph_mode_overlay(
            base_config("fish_omni.yaml"), mode, capture_sizes(STREAMS, None), COMPARISON
        )
    return {CONFIGS / f"{name}.yaml": HEAD + text for name, text in files.items()}


def fingerprints(version: str) -> dict[Path, str]:
    """fingerprints.json with every host symbol that the table names, as it is in the host installed here."""
    table = verified_fingerprints()
    for symbol in {symbol for patch in PATCHES for symbol in (*patch.symbols, *(hook.symbol for hook in patch.hooks))}:
        if digest := fingerprint(symbol.module, symbol.qualname):
            versions = table.setdefault(f"{symbol.module}:{symbol.qualname}", {}).setdefault(digest, [])
            versions[:] = sorted({*versions, version})
    ordered = {key: dict(sorted(table[key].items())) for key in sorted(table)}
    return {FINGERPRINTS: json.dumps(ordered, indent=1) + "\n"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    parser.add_argument("--fingerprints", action="store_true", help="fingerprints.json too, of the host installed here")
    options = parser.parse_args(arguments)
    files = {**pages(), **configs()}
    if options.fingerprints:
        version = host_info().version
        if version is None:
            print("vllm-omni is not installed here", file=sys.stderr)
            return 2
        files |= fingerprints(version)
    stray = sorted({*CONFIGS.glob("*.yaml")} - files.keys())
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stray:
        print(f"{path.name} is no file of this tool", file=sys.stderr)
    for path in stale:
        if options.check:
            print(f"{path.name} is out of date: run python tools/generate.py")
        else:
            path.write_text(files[path], encoding="utf-8")
            print(path.name)
    return 1 if stray or (options.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
