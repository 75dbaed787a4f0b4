"""The key table of docs/migration.md, from the rules that `areal config --from-areal` applies."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_launch.commands.from_areal import RULES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "migration.md"
BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"


def main() -> int:
    """Writes the table between its marks."""
    lines = ["| AReaL | here |", "|---|---|"]
    for key, rule in RULES.items():
        if key != rule:
            rest = ", other keys" if any(each.startswith(f"{key}.") for each in RULES) else ""
            says = f"`{rule}`" if isinstance(rule, str) else rule.says
            lines.append(f"| `{key}`{rest} | {says} |")
    same = ", ".join(f"`{key}`" for key, rule in RULES.items() if key == rule)
    table = "\n".join([f"These keys have the same name and meaning here: {same}.", "", *lines])
    head, _, rest = TARGET.read_text().partition(BEGIN)
    TARGET.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
