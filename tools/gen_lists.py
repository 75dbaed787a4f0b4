"""Lists and tables of built-in names inside hand-written pages, from the tables in the code.

A page has a pair of comments, `<!-- list: NAME -->` and `<!-- end of list -->`; `make docs` writes
what is between them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from areal.config.transports import TRANSPORTS
from areal.rewards import BUILTIN

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- list: ([\w-]+) -->\n(.*?)<!-- end of list -->", re.DOTALL)


def rewards() -> str:
    """The built-in rewards."""
    rows = [
        f"| `{name}` | {reward.meaning} | `{_file(reward.module)}::{reward.function}` |"
        for name, reward in BUILTIN.items()
    ]
    return "\n".join(["| name | the reward | code |", "|---|---|---|", *rows])


def transports() -> str:
    """The weight transports."""
    rows = [f"| `{name}` | {each.goes} | {each.needs} |" for name, each in TRANSPORTS.items()]
    head = ["| `weight_sync.transport` | where the bytes go | needs |", "|---|---|---|"]
    return "\n".join([*head, *rows])


LISTS: dict[str, tuple[str, Callable[[], str]]] = {
    "rewards": ("docs/rewards.md", rewards),
    "transports": ("docs/weight-sync.md", transports),
}
"""Name of a list -> the page that has it, and what writes it."""


def _file(module: str) -> str:
    return f"services/{module.replace('.', '/')}.py"


def filled(page: str) -> str:
    """Returns a page's text with its lists as the code has them; raises SystemExit."""
    text = (ROOT / page).read_text()
    expected = sorted(name for name, (where, _) in LISTS.items() if where == page)
    if (found := sorted(match[1] for match in BLOCK.finditer(text))) != expected:
        raise SystemExit(f"{page}: has the lists {found}, expected {expected} (tools/gen_lists.py)")

    def block(match: re.Match[str]) -> str:
        return f"<!-- list: {match[1]} -->\n{LISTS[match[1]][1]()}\n<!-- end of list -->"

    return BLOCK.sub(block, text)


def main() -> int:
    """Writes the lists."""
    for page in sorted({page for page, _ in LISTS.values()}):
        (ROOT / page).write_text(filled(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
