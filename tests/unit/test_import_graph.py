"""The source is arranged in floors: no cycles, and no import from one service to another.

The numbers of rooms and arrows have no limit. docs/architecture.md shows them, so a change of them
is in the diff that a reviewer reads.
"""

from __future__ import annotations

from pathlib import Path

from tools.import_graph import BEGIN, DOCUMENT, END, between, house, table


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / "house" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_packages_when_measured_then_services_import_the_library_alone() -> None:
    packages = between()
    assert all(house(name).cycles() == [] for name in packages)
    assert packages.pop("areal") == set()
    assert packages.pop("areal_torch") == {"areal"}
    assert {name for name, below in packages.items() if "areal_torch" in below} == {
        "areal_inference",
        "areal_trainer",
    }
    assert all(below <= {"areal", "areal_torch"} for below in packages.values()), packages


def test_document_when_read_then_it_shows_what_is_measured() -> None:
    shown = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == table(), "run: python tools/import_graph.py --write"


def test_cycle_when_one_import_is_lazy_then_found(tmp_path: Path) -> None:
    write(tmp_path, __init__="", a="from house.b import x\n", b="def f():\n    import house.a\n")
    assert house("house", tmp_path).cycles() == ["a", "b"]


def test_import_when_only_for_type_checkers_then_no_arrow(tmp_path: Path) -> None:
    checking = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.b\n"
    write(tmp_path, __init__="", a=checking, b="import house.c\n", c="")
    found = house("house", tmp_path)
    assert found.graph == {"a": set(), "b": {"c"}, "c": set()}
    assert found.floors() == [["a", "c"], ["b"]]
