"""The planted bugs still fit the source: each changes one line that is there once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.changed_tests import UNKNOWN_S
from tools.mutants.__main__ import BATCH_S, ROOT, Mutant, batches, mutants

PACKAGES = {path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists()}


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.id)
def test_mutant_when_planted_then_one_line_of_its_file_changes(
    mutant: Mutant, tmp_path: Path
) -> None:
    before = (ROOT / mutant.file).read_text()
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(before)
    mutant.plant(tmp_path)
    after = copy.read_text()
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    assert sum(was != now for was, now in pairs) == 1
    if mutant.file.endswith(".py"):
        compile(after, mutant.file, "exec")


def test_mutants_when_read_then_each_names_a_test_file_that_is_there() -> None:
    missing = {mutant.id: mutant.by for mutant in mutants() if not (ROOT / mutant.by).is_file()}
    assert missing == {}


def test_batches_when_files_are_costly_then_the_next_call_has_the_rest_in_order() -> None:
    names = ["tests/a.py", "tests/b.py", "tests/new.py", "tests/c.py"]
    seconds = {"tests/a.py": 1.0, "tests/b.py": BATCH_S, "tests/c.py": BATCH_S - UNKNOWN_S}
    found = list(batches([ROOT / name for name in names], seconds))
    assert found == [names[:2], names[2:]]
    assert list(batches([], seconds)) == []


def test_mutants_when_counted_then_every_package_has_some() -> None:
    every = mutants()
    assert len({mutant.id for mutant in every}) == len(every) >= 60
    assert {Path(mutant.file).parts[1] for mutant in every} >= PACKAGES


def test_mutant_when_its_text_is_gone_then_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for was, times in (("x = 2", 0), ("x = 1", 2)):
        with pytest.raises(ValueError, match=f"b01: a.py: {times} times: {was}"):
            Mutant("b01", "a.py", was, "y", "").plant(tmp_path)
