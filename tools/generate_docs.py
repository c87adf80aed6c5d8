# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README.md and docs/items.md from the patch table and the verified stacks.

python tools/generate_docs.py            # write
python tools/generate_docs.py --check    # exit 1 where a file differs
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from omni_speech_accel.host.source import verified_fingerprints
from omni_speech_accel.plugin.table import PATCHES, Patch

ROOT = Path(__file__).resolve().parent.parent
STACKS = ROOT / "omni_speech_accel" / "host" / "stacks.json"


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


def items_table() -> str:
    rows = ["| item | what it does | where | result against stock |", "|---|---|---|---|"]
    rows += [f"| `{patch.key}` | {patch.summary} | {patch.where} | {patch.against_stock} |" for patch in PATCHES]
    return "\n".join(rows)


def hosts_table() -> str:
    versions = hosts()
    rows = ["| item | devices | " + " | ".join(versions) + " |", "|---|---|" + "---|" * len(versions)]
    for patch in PATCHES:
        marks = ["yes" if applies(patch, version) else "not applied" for version in versions]
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
        "Made by `tools/generate_docs.py` from the patch table; do not edit.",
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


def render() -> dict[Path, str]:
    readme = ROOT / "README.md"
    text = replace_section(readme.read_text(encoding="utf-8"), "items", items_table())
    return {readme: replace_section(text, "hosts", hosts_table()), ROOT / "docs" / "items.md": items_page()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in render().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run tools/generate_docs.py")
        return 1 if stale else 0
    for path, text in render().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
