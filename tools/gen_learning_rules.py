"""The table in docs/runbooks/reward-does-not-rise.md, from the rules."""

from __future__ import annotations

import sys
from pathlib import Path

from areal.config.learning_rules import PAGE, RULES

TARGET = Path(__file__).resolve().parent.parent / PAGE
BEGIN, END = "<!-- rules -->\n", "<!-- end of rules -->\n"


def table() -> str:
    """Returns the rules as a Markdown table."""
    lines = ["| line | appears when | what to do |", "|---|---|---|"]
    lines += [f"| `{rule.name}` | {rule.shown_when}. | {rule.advice} |" for rule in RULES]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the table between its two marks."""
    before, _, rest = TARGET.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    TARGET.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
