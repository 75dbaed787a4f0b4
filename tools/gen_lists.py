"""Lists and tables of built-in names inside hand-written pages, from the tables in the code.

A page has a pair of comments, `<!-- list: NAME -->` and `<!-- end of list -->`; `make docs` writes
what is between them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from areal.config.presets import PRESETS
from areal.config.transports import TRANSPORTS
from areal.rewards import BUILTIN
from areal.workflows.gyms import SOURCES

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?ms)^( *)<!-- list: ([\w-]+) -->\n(.*?)<!-- end of list -->")


def rewards() -> str:
    """Returns a table of the built-in rewards."""
    rows = [
        f"| `{name}` | {reward.meaning} | `{_file(reward.module)}::{reward.function}` |"
        for name, reward in BUILTIN.items()
    ]
    return "\n".join(["| name | the reward | code |", "|---|---|---|", *rows])


def transports() -> str:
    """Returns a table of the weight transports."""
    rows = [f"| `{name}` | {each.goes} | {each.needs} |" for name, each in TRANSPORTS.items()]
    head = ["| `weight_sync.transport` | where the bytes go | needs |", "|---|---|---|"]
    return "\n".join([*head, *rows])


def environments() -> str:
    """The libraries of environments, and a class of one's own."""
    rows = [
        f"| `{name}:{each.example}` | {each.rows} | {each.plays} |"
        for name, each in SOURCES.items()
    ]
    own = "| `my_package.worlds:Maze` (module and class) | your own | as your class decides |"
    head = "| name | rows | what the model reads and answers |"
    return "\n".join([head, "|---|---|---|", *rows, own])


def algorithms() -> str:
    """The names of the presets."""
    return textwrap.fill(", ".join(f"`{name}`" for name in PRESETS) + ".", 98)


LISTS: dict[str, tuple[str, Callable[[], str]]] = {
    "rewards": ("docs/rewards.md", rewards),
    "environments": ("docs/workflows.md", environments),
    "algorithms": ("README.md", algorithms),
    "transports": ("docs/weight-sync.md", transports),
}
"""Name of a list -> the page that has it, and what writes it."""


def _file(module: str) -> str:
    return f"services/{module.replace('.', '/')}.py"


def filled(page: str) -> str:
    """Returns a page's text with its lists as the code has them; raises SystemExit."""
    text = (ROOT / page).read_text()
    expected = sorted(name for name, (where, _) in LISTS.items() if where == page)
    if (found := sorted(match[2] for match in BLOCK.finditer(text))) != expected:
        raise SystemExit(f"{page}: has the lists {found}, expected {expected} (tools/gen_lists.py)")

    def block(match: re.Match[str]) -> str:
        text = f"<!-- list: {match[2]} -->\n{LISTS[match[2]][1]()}\n<!-- end of list -->"
        return textwrap.indent(text, match[1])

    return BLOCK.sub(block, text)


def main() -> int:
    """Writes the lists into their pages."""
    for page in sorted({page for page, _ in LISTS.values()}):
        (ROOT / page).write_text(filled(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
