"""Text files and pipes are UTF-8 whatever the locale, and JSON Lines are split at newlines only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services"
_MODES = set("rwabxt+")


def _without_encoding(source: str) -> Iterator[int]:
    """Lines that read or write text in the encoding of the locale."""
    for call in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)):
        named = {keyword.arg for keyword in call.keywords}
        if "encoding" in named:
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = getattr(getattr(call.func, "value", None), "id", "")
        words = [a.value for a in call.args if isinstance(a, ast.Constant)]
        mode = next((w for w in words if isinstance(w, str) and w and set(w) <= _MODES), "")
        if name == "read_text":
            wrong = not call.args
        elif name == "write_text":
            wrong = len(call.args) < 2
        elif name in ("open", "fdopen", "NamedTemporaryFile"):
            # Where other things are opened, and os.open, no mode is given.
            file = (name == "open" and not owner and isinstance(call.func, ast.Name)) or mode != ""
            wrong = file and "b" not in mode and "utf-8" not in words
        elif name in ("run", "Popen", "check_output"):
            wrong = "text" in named or "universal_newlines" in named
        else:
            wrong = name == "TextIOWrapper"
        if wrong:
            yield call.lineno


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("p.read_text()", [1]),
        ("p.read_text('utf-8')", []),
        ("p.write_text(x)", [1]),
        ("p.write_text(x, encoding='utf-8')", []),
        ("open(p)", [1]),
        ("p.open('w')", [1]),
        ("p.open('ab')", []),
        ("os.open(p, os.O_RDONLY)", []),
        ("p.open('a', 1, 'utf-8')", []),
        ("os.fdopen(d, 'w')", [1]),
        ("subprocess.run(a, text=True)", [1]),
        ("box.open(limits)", []),
    ],
)
def test_text_without_encoding_when_looked_for_then_found(source: str, found: list[int]) -> None:
    assert list(_without_encoding(source)) == found


# A lock file of no content.
ALLOWED = {"areal_launch/processes/free_ports.py"}


def test_services_when_they_read_or_write_text_then_they_name_the_encoding() -> None:
    found = [
        f"{place}:{line}"
        for file in sorted(SERVICES.rglob("*.py"))
        if (place := str(file.relative_to(SERVICES))) not in ALLOWED
        for line in _without_encoding(file.read_text("utf-8"))
    ]
    assert found == []
