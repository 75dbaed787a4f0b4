"""Which test files a change can reach, the nearest first.

An arrow runs from a file to each file of ours that it mentions: by an import, at its top or inside
a function; by a string that is a module's name, since that is how processes are started; from a
test to the conftest files above it. What is not imported (scripts, templates, pages, examples)
reaches the files that mention its name or its folder's. A test file's distance is the number of
arrows to the change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.import_graph import ROOT, imports, modules

_PLACES = ("services", "tests", "tools", "examples")
_LAZY = "_EXPORTS"


def known_modules(root: Path = ROOT) -> dict[str, Path]:
    """Returns every module of ours by the dotted name under which files import it."""
    found = modules(root / "services")
    for place in _PLACES[1:]:
        for name, file in modules(root / place).items():
            found[f"{place}.{name}" if name else place] = file
    return found


class Reach:
    """The arrows between all files of ours, read once."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._known = known_modules(root)
        self._lazy = dict(_lazy_names(self._known))
        self._texts = {file: file.read_text() for file in self._known.values()}
        self._mentions: dict[Path, set[Path]] = {}
        for file in self._known.values():
            for target in self._targets(file):
                if target != file:
                    self._mentions.setdefault(target, set()).add(file)

    def tests(self, changed: Iterable[Path]) -> dict[Path, int]:
        """Returns the test files that the change reaches, with their distance to it."""
        distance: dict[Path, int] = {}
        for path in changed:
            file = self._root / path
            if file in self._texts:
                distance[file] = 0
            if path.suffix != ".py" or path.parts[0] == "examples":
                distance |= {reader: 1 for reader in self._readers(path) if reader not in distance}
        ahead = list(distance)
        while ahead:
            ahead.sort(key=distance.__getitem__, reverse=True)
            file = ahead.pop()
            for reader in self._mentions.get(file, ()):
                if distance[file] + 1 < distance.get(reader, 1_000_000):
                    distance[reader] = distance[file] + 1
                    ahead.append(reader)
        found = {file: steps for file, steps in distance.items() if _is_test(file)}
        return dict(sorted(found.items(), key=lambda each: each[1]))

    def _targets(self, file: Path) -> Iterator[Path]:
        tree = ast.parse(self._texts[file])
        for name in imports(tree, self._known):
            yield self._known[name]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from (self._lazy[name] for name in names if name in self._lazy)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in (node.value, f"{node.value}.__main__"):
                    # A word is a folder's name, not a module's: "areal", "tools".
                    if name in self._known and ("_" in name or "." in name):
                        yield self._known[name]
                # What runs as a script is named as the file beside it.
                if (
                    node.value.endswith(".py")
                    and (beside := file.parent / node.value) in self._texts
                ):
                    yield beside
        if _is_test(file):
            for folder in file.relative_to(self._root).parents:
                if (above := self._root / folder / "conftest.py") in self._texts:
                    yield above

    def _readers(self, path: Path) -> list[Path]:
        """Files that mention a path's name, or the folder in which files of its kind are."""
        folder = path.parent.name if path.parts[0] == "services" else path.parts[0]
        words = (path.name, f'"{folder}"', f"{folder}/")
        return [file for file, text in self._texts.items() if any(word in text for word in words)]


def _lazy_names(known: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """The public names of packages that load their modules on first use."""
    for name, file in known.items():
        if file.name != "__init__.py" or _LAZY not in (text := file.read_text()):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _LAZY:
                for public, module in ast.literal_eval(node.value).items():
                    yield f"{name}.{public}", known[module]


def _is_test(file: Path) -> bool:
    return file.name.startswith("test_") and file.suffix == ".py"
