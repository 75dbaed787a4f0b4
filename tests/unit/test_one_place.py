"""A built-in name is written in one table; pages and help texts have it from there."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.main import get_command

import areal
from areal.config.experiment import GRPOConfig
from areal.config.presets import PRESETS
from areal.config.services import DatasetConfig
from areal.config.trackers import TRACKERS
from areal.config.transports import TRANSPORTS
from areal.datasets.rows import READERS
from areal.errors import InvalidInput
from areal.rewards import BUILTIN, CHECKERS
from areal.workflows.gyms import SOURCES, find_environment
from areal_launch.cli import app
from areal_launch.doctor.preflight import dataset_problem

ROOT = Path(__file__).resolve().parents[2]
V1 = ROOT / "services/areal/v1"
sys.path.insert(0, str(ROOT / "tools"))

import gen_lists  # noqa: E402

_WRITTEN_BY_MAKE_DOCS = {"api.md", "commands.md", "configuration.md", "algorithms.md", "metrics.md"}


def texts() -> Iterator[tuple[str, str]]:
    """Every page, proto, help text and docstring that a name could be repeated in, but tables."""
    for file in sorted(
        [
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/*.md"),
            *ROOT.glob("services/*/README.md"),
            *ROOT.glob("services/areal*/**/*.py"),
            *ROOT.glob("examples/*.py"),
            *ROOT.glob("proto/**/*.proto"),
            *ROOT.glob("charts/areal/**/*.yaml"),
        ]
    ):
        generated = file.name in _WRITTEN_BY_MAKE_DOCS or file.is_relative_to(V1)
        if generated or file.name == "CHANGELOG.md":
            continue
        yield str(file.relative_to(ROOT)), gen_lists.BLOCK.sub("", file.read_text())


def lists_of(names: set[str], fewest: int = 3) -> Iterator[str]:
    """Places with `fewest` of the names in a row, separated only by what separates in a list."""
    name = rf"[`'\"*]*(?:{'|'.join(sorted(names, key=len, reverse=True))})[`'\"*]*"
    between = r"(?:,\s*(?:#|//|\"|'|f\")?\s*(?:or |and )?|\s+or\s+|\s+and\s+|\s*\|\s*)"
    pattern = re.compile(rf"(?<![\w/.-]){name}(?:{between}{name}){{{fewest - 1},}}(?![\w/-])")
    for file, text in texts():
        for found in pattern.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{file}:{line}: {' '.join(found[0].split())}"


@pytest.mark.parametrize("page", sorted({page for page, _ in gen_lists.LISTS.values()}))
def test_page_when_its_lists_are_written_again_then_it_is_the_committed_one(page: str) -> None:
    assert gen_lists.filled(page) == (ROOT / page).read_text(), "make docs"


def test_page_when_it_lacks_a_list_then_the_generator_names_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gen_lists, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/rewards.md").write_text("# Rewards\n")
    with pytest.raises(SystemExit, match=r"has the lists \[\], expected \['rewards'\]"):
        gen_lists.filled("docs/rewards.md")


def test_lists_of_names_when_written_by_hand_then_they_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = 'help="one of aa, `bb`\n  or cc"'
    monkeypatch.setattr(sys.modules[__name__], "texts", lambda: iter([("a.md", found)]))
    assert list(lists_of({"aa", "bb", "cc"})) == ['a.md:1: aa, `bb` or cc"']
    assert list(lists_of({"aa", "dd", "cc"})) == []


def test_transports_when_listed_then_the_page_has_them_and_no_text_repeats_them() -> None:
    assert all(f"| `{name}` |" in gen_lists.transports() for name in TRANSPORTS)
    assert list(lists_of(set(TRANSPORTS))) == []


def test_trackers_when_listed_then_each_has_an_adapter_an_extra_and_a_row() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    metrics = (ROOT / "docs/metrics.md").read_text()
    for name in TRACKERS:
        assert name in extras
        assert f"| `{name}` |" in metrics
    source = (ROOT / "services/areal_torch/training/tracker.py").read_text()  # needs no torch here
    adapters = re.search(r"^_KINDS[^{]*\{(.*?)^\}", source, re.DOTALL | re.MULTILINE)
    assert adapters
    assert re.findall(r'^    "(\w+)":', adapters[1], re.MULTILINE) == list(TRACKERS)
    assert list(lists_of(set(TRACKERS))) == []


def test_algorithms_when_listed_then_key_and_page_have_them_and_no_text_repeats_them() -> None:
    assert get_args(get_type_hints(GRPOConfig)["algorithm"]) == tuple(PRESETS)
    assert all(f"`{name}`" in gen_lists.algorithms() for name in PRESETS)
    assert list(lists_of(set(PRESETS), 5)) == []


def test_environments_when_the_name_is_none_then_every_library_is_named() -> None:
    with pytest.raises(InvalidInput) as caught:
        find_environment("chess")
    for name, source in SOURCES.items():
        assert f"{name}:{source.form}" in str(caught.value)
        assert f"| `{name}:{source.example}` |" in gen_lists.environments()
    assert list(lists_of(set(SOURCES))) == []


def test_dataset_formats_when_a_file_is_missing_then_each_is_known_to_be_a_file() -> None:
    page = (ROOT / "docs/data.md").read_text()
    for suffix in READERS:
        assert f"`{suffix}`" in page
        config = GRPOConfig(train_dataset=DatasetConfig(path=f"/nowhere/rows{suffix}"))
        assert "no such file" in dataset_problem(config)


def test_workflows_when_exported_then_docs_workflows_names_each() -> None:
    page = (ROOT / "docs/workflows.md").read_text()
    exported = {name for name in areal.__all__ if name.endswith("Workflow")}
    assert [
        name for name in sorted(exported) if f"{name}`" not in page and f"`{name}" not in page
    ] == []


def test_public_names_when_checked_by_mypy_then_they_are_those_that_load() -> None:
    """Each as `from module import X as X`, which makes it public for type checkers."""
    (checked,) = (
        node.body
        for node in ast.parse((ROOT / "services/areal/__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    found = {
        alias.asname: node.module
        for node in checked
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert found == areal._EXPORTS
    assert list(areal.__all__) == sorted(areal._EXPORTS)
    assert all(getattr(areal, name).__name__ == name for name in ("rubric", "EnvWorkflow"))


def test_rewards_when_one_is_added_then_help_and_page_have_it_and_no_text_repeats_them() -> None:
    submit = get_command(app).commands["submit"]  # type: ignore[attr-defined]
    help_text = next(each.help for each in submit.params if each.name == "reward")
    assert ", ".join(BUILTIN) in help_text
    assert all(f"| `{name}` |" in gen_lists.rewards() for name in BUILTIN)
    assert set(BUILTIN) - CHECKERS == {"reward_model"}
    assert list(lists_of(set(BUILTIN))) == []
    assert list(lists_of(set(BUILTIN) - {"math"}, 2)) == []
