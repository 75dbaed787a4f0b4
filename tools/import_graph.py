"""Rooms, arrows and floors of the source, measured; docs/architecture.md holds the table.

A room is a module or folder directly inside a package. An arrow runs from a room to one that it
imports, wherever in a file it does so; what only type checkers import is not counted, nor what
`__init__` offers lazily. A room's floor is one above the highest room that it imports.

    python tools/import_graph.py           prints the table; exit code 1 if there is a cycle
    python tools/import_graph.py --write   writes it into docs/architecture.md
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- import graph: begin -->", "<!-- import graph: end -->"
GENERATED = "v1"  # made from proto/; not a room of ours

Graph = dict[str, set[str]]
"""Room -> rooms that it imports."""


@dataclass(frozen=True)
class House:
    """One package: its rooms and how they stand on each other."""

    name: str
    graph: Graph

    @property
    def arrows(self) -> int:
        """Pairs of rooms of which one imports the other."""
        return sum(len(below) for below in self.graph.values())

    def cycles(self) -> list[str]:
        """Rooms that reach themselves."""
        return sorted(room for room in self.graph if room in self._below(room))

    def floors(self) -> list[list[str]]:
        """Rooms by floor, the lowest first; only meaningful without cycles."""
        height: dict[str, int] = {}

        def of(room: str) -> int:
            if room not in height:
                height[room] = 1 + max((of(each) for each in self.graph[room]), default=0)
            return height[room]

        floors: dict[int, list[str]] = {}
        for room in sorted(self.graph):
            floors.setdefault(of(room), []).append(room)
        return [floors[level] for level in sorted(floors)]

    def _below(self, room: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(self.graph[room])
        while ahead:
            if (each := ahead.pop()) not in seen:
                seen.add(each)
                ahead += self.graph[each]
        return seen


def modules(services: Path) -> dict[str, Path]:
    """Returns every module below `services` by its dotted name, except generated code."""
    found = {}
    for file in sorted(services.rglob("*.py")):
        parts = file.relative_to(services).with_suffix("").parts
        if GENERATED not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file's code imports, at its top or inside a function."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]  # noqa: PLW2901 - a symbol: its module
            if name:
                yield name


def house(package: str, services: Path = SERVICES) -> House:
    """Reads one package of `services`."""
    known = modules(services)
    graph: Graph = {}
    for name, file in known.items():
        if name == package or name.split(".")[0] != package:
            continue
        room = name.split(".")[1]
        below = graph.setdefault(room, set())
        for target in imports(ast.parse(file.read_text()), known):
            parts = target.split(".")
            if parts[0] == package and len(parts) > 1 and parts[1] != room:
                below.add(parts[1])
    return House(package, graph)


def between(services: Path = SERVICES) -> Graph:
    """Package -> packages that it imports."""
    known = modules(services)
    graph: Graph = {name.split(".")[0]: set() for name in known}
    for name, file in known.items():
        package = name.split(".")[0]
        targets = imports(ast.parse(file.read_text()), known)
        graph[package] |= {each.split(".")[0] for each in targets} - {package}
    return graph


def table(services: Path = SERVICES) -> str:
    """Markdown: every package, then the floors of the library and of the command."""
    packages = sorted(between(services))
    rows = ["| package | rooms | floors | arrows | cycles |", "|---|--:|--:|--:|--:|"]
    houses = {name: house(name, services) for name in packages}
    for name, each in houses.items():
        cycles = each.cycles()
        floors = "" if cycles else str(len(each.floors()))
        rows.append(
            f"| `{name}` | {len(each.graph)} | {floors} | {each.arrows} "
            f"| {', '.join(cycles) or 0} |"
        )
    for name in ("areal", "areal_launch"):
        if houses[name].cycles():
            continue
        rows += ["", f"`{name}`, from the top floor down:", ""]
        floors = houses[name].floors()
        rows += [f"- {len(floors) - i}: {', '.join(f)}" for i, f in enumerate(reversed(floors))]
    return "\n".join(rows)


def main(arguments: list[str]) -> int:
    """Prints or writes the table; returns the exit code."""
    made = table()
    if "--write" in arguments:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
    else:
        print(made)
    return 1 if any(house(name).cycles() for name in between()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
