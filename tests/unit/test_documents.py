"""What the documents point at exists, and they say what is true now."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("services/**/README.md"),
        *ROOT.glob("tools/**/*.md"),
    ]
)
_SYMBOL = re.compile(r"`([\w./-]+\.py)::([\w.]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")


def has_symbol(file: Path, dotted: str) -> bool:
    """Whether a module defines `Class.method`, a function or a name."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for part in dotted.split("."):
        found = [node for node in body if part in _names(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def test_house_tour_when_followed_then_eight_stops_of_symbols_that_exist() -> None:
    text = (ROOT / "docs" / "house-tour.md").read_text()
    assert len(re.findall(r"^## \d\.", text, re.MULTILINE)) == 8
    assert len(_SYMBOL.findall(text)) >= 20


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_when_it_names_a_symbol_or_file_then_it_exists(document: Path) -> None:
    text = document.read_text()
    gone = [
        f"{name}::{symbol}"
        for name, symbol in _SYMBOL.findall(text)
        if not (ROOT / name).is_file() or not has_symbol(ROOT / name, symbol)
    ]
    gone += [
        link
        for link in _LINK.findall(text)
        if "://" not in link and not link.startswith("mailto:")
        if not (document.parent / link).exists()
    ]
    assert gone == []


def test_failure_modes_when_read_then_every_entry_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "failure-modes.md").read_text()
    entries = re.findall(r"^\*\*[^*]+\*\*\n\n(?:[- ] .+\n)+", text, re.MULTILINE)
    assert len(entries) > 80
    assert text.count("- Shown by:") == len(entries), "a title is not followed by its list"
    for entry in entries:
        shown = entry.partition("- Shown by:")[2]
        assert re.search(r"`(\w+::\w+|make chaos)`", shown), f"no test is named: {entry}"
        for file, name in re.findall(r"`(\w+)::(\w+)`", shown):
            [path] = (ROOT / "tests").rglob(f"test_{file}.py")
            found = re.search(rf"^(async )?def test_{name}", path.read_text(), re.MULTILINE)
            assert found, f"{path.name} has no test_{name}…: {entry}"


@pytest.mark.parametrize("page", ["configuration.md", "failure-modes.md"])
def test_page_of_long_entries_when_read_in_a_terminal_then_it_fits_80_columns(page: str) -> None:
    lines = (ROOT / "docs" / page).read_text().splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_symbol_when_missing_then_noticed(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("X: int = 1\nclass A:\n    async def run(self): ...\n")
    assert has_symbol(file, "A.run")
    assert has_symbol(file, "X")
    assert not has_symbol(file, "A.walk")
    assert not has_symbol(file, "run")


def test_index_when_read_then_every_page_is_in_it() -> None:
    linked = set(_LINK.findall((ROOT / "docs" / "README.md").read_text()))
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
    assert pages <= linked, f"docs/README.md has no {', '.join(sorted(pages - linked))}"


def test_decisions_when_listed_then_each_has_a_number_of_its_own() -> None:
    numbers = [page.name[:4] for page in sorted(ROOT.glob("docs/adr/*.md"))]
    assert len(numbers) == len(set(numbers))
    assert all(number.isdigit() for number in numbers)


def tree_paths(tree: str) -> list[str]:
    """Each line's path, made of the lines that it is indented below."""
    found: list[str] = []
    above: list[tuple[int, str]] = []
    for line in tree.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        above = [each for each in above if each[0] < depth] + [(depth, name)]
        found.append("".join(part for _, part in above))
    return found


def test_tree_of_the_house_when_read_then_it_is_the_tree() -> None:
    text = (ROOT / "docs" / "house-tour.md").read_text()
    [tree] = re.findall(r"## Where things are\n\n```\n(.*?)```", text, re.DOTALL)
    paths = tree_paths(tree)
    assert [path for path in paths if not (ROOT / path).is_dir()] == []
    packages = {f"services/{file.parent.name}/" for file in ROOT.glob("services/*/__init__.py")}
    rooms = {f"services/areal/{f.parent.name}/" for f in ROOT.glob("services/areal/*/__init__.py")}
    assert packages | rooms <= set(paths), f"missing: {sorted((packages | rooms) - set(paths))}"


def test_documents_when_read_then_no_key_that_is_gone() -> None:
    moved = (ROOT / "services/areal/config/moved.py").read_text()
    there = (ROOT / "docs/configuration.md").read_text()
    gone = [
        key
        for key in re.findall(r'^    "([\w.]+\.[\w.]+)":', moved, re.MULTILINE)
        if f"`{key}`" not in there
    ]
    assert gone
    pattern = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, gone)) + r")(?!\w)")
    # In the last one the keys are AReaL's.
    others = ("CHANGELOG.md", "docs/adr/0015-configuration-keys.md", "docs/migration.md")
    history = {ROOT / each for each in others}
    found = [
        f"{page.relative_to(ROOT)}: {key}"
        for page in DOCUMENTS
        if page not in history
        for key in pattern.findall(page.read_text())
    ]
    assert found == []
