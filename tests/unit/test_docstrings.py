"""Docstrings are sentences, and the files and symbols that they name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    file
    for folder in ("services", "tools")
    for file in (ROOT / folder).rglob("*.py")
    if "v1" not in file.parts  # generated
)
PACKAGES = {file.parent.name for file in (ROOT / "services").glob("*/__init__.py")}
FRAGMENT = re.compile(r"(Of|Those|Nor|As|So (many|much|long|few))\b")
FEWEST_WORDS = 4
QUOTED = re.compile(r"(?<!`)(`{1,2})([\w./-]+(?:::[\w.]+)?)(?:\([^`]*)?\1(?!`)")
PATH = re.compile(r"(?<![\w/.])(?:docs|examples|services|tests|tools)/[\w/-]+\.(?:md|py|yaml)\b")
# Names of other libraries, and of an example, that no code of ours mentions.
FOREIGN = {"areal_x", "gate_up_proj", "read_eval_log", "register_fake"}
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.Constant, bool]]:
    """Yields each docstring, and whether it describes an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for number, each in enumerate(body if isinstance(body, list) else ()):
            match each:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield text, number > 0 or not isinstance(node, OWNERS)


@cache
def code_of(file: Path) -> str:
    """Returns a file's text without its docstrings."""
    lines = file.read_text().splitlines()
    for text, _ in docstrings(ast.parse(file.read_text())):
        lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(lines)


@cache
def known_words() -> frozenset[str]:
    """Returns the words of our code outside docstrings, and the names of files."""
    stems = {file.stem for folder in ("tests", "tools") for file in (ROOT / folder).rglob("*.*")}
    return frozenset(stems | FOREIGN).union(*(re.findall(r"\w+", code_of(file)) for file in FILES))


def fragment(text: str, attribute: bool) -> str:
    """Returns what makes a docstring a fragment, or "" if nothing does."""
    if found := FRAGMENT.match(text):
        return f"begins with {found[0]!r}"
    words = text.split()
    if not attribute and len(words) < FEWEST_WORDS and "`" not in text:
        return f"has {len(words)} words"
    return ""


def missing(name: str, near: Path) -> bool:
    """Whether a quoted name is that of a file or a symbol of ours, and does not exist.

    `folder/file.py` and `file.py::symbol` are looked for beside the file and in the packages;
    `areal_x.module.symbol` where it says; `some_name` in all of our code.
    """
    path, _, symbol = name.partition("::")
    if path.endswith(".py"):
        places = [*near.parents, ROOT / "services", ROOT / "services/areal"]
        files = [place / path for place in places if (place / path).is_file()]
        first = symbol.split(".")[0]
        return not files or bool(first and not re.search(rf"\b{first}\b", code_of(files[0])))
    if (parts := name.split("."))[0] in PACKAGES and len(parts) > 1 and "/" not in name:
        place = ROOT / "services"
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        module = place / f"{parts[0]}.py" if parts else place / "__init__.py"
        if parts and module.is_file():
            parts = parts[1:]
        else:
            module = place / "__init__.py"
        return bool(parts) and not re.search(rf"\b{parts[0]}\b", code_of(module))
    return any(
        re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", part) and part not in known_words()
        for part in parts
        if "/" not in name
    )


def faults(file: Path) -> list[str]:
    """Returns one line for each fault of a file's docstrings."""
    found = []
    for each, attribute in docstrings(ast.parse(file.read_text())):
        text = " ".join(each.value.split())
        if what := fragment(text, attribute):
            found.append(f"{each.lineno}: {what}: {text[:60]}")
        names = [name for _, name in QUOTED.findall(text) if missing(name, file)]
        names += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
        found += [f"{each.lineno}: there is no {name}" for name in names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstring_when_read_then_a_sentence_whose_references_exist(file: Path) -> None:
    assert faults(file) == []


@pytest.mark.parametrize(
    "text",
    [
        "Of the model.",
        "Those that run.",
        "So many calls are made at once.",
        "As it was written.",
        "Closes it.",
        "Returns what `areal.gone.name` has.",
        "Returns what `areal.errors.Gone` has.",
        "Returns what `errors.py::Gone` has.",
        "Returns what `gone_function` has.",
        "Returns what `errors.gone_function` has.",
        "Returns what docs/gone.md says.",
    ],
)
def test_docstring_when_a_fragment_or_a_dead_reference_then_noticed(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'"""{text}"""\n')
    assert len(faults(file)) == 1


def test_docstring_when_its_references_exist_then_not_noticed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    names = ("areal.errors.NotFound", "errors.py::NotFound", "module.py", "run_service", "a.b")
    text = f"Needs {', '.join(f'`{name}`' for name in names)}, see docs/data.md."
    file.write_text(f'"""{text}"""\n')
    assert faults(file) == []
