"""`make examples`: each example is in its list with a test that exists, and a failure is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import examples

ROOT = Path(__file__).resolve().parents[2]


def test_list_when_compared_with_the_folder_then_each_example_is_in_it() -> None:
    files = {file.stem for file in (ROOT / "examples").iterdir() if file.suffix in {".py", ".yaml"}}
    assert files == set(examples.MINIATURES)


def test_tests_when_collected_then_each_exists() -> None:
    tests = sorted(examples.MINIATURES.values())
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    listed = [line for line in found.stdout.splitlines() if "::" in line]
    assert sorted(listed) == tests


def test_checked_when_a_test_has_parameters_then_its_words_are_told() -> None:
    assert examples.checked("tests/a.py::test_a_when_run_then_it_learns[keys0]") == "it learns"


def test_main_when_one_fails_then_its_output_and_how_to_repeat_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: examples.MINIATURES[name] for name in ("dpo", "distill")}
    monkeypatch.setattr(examples, "MINIATURES", names)
    answers = {names["dpo"]: (True, 3.2, "fine"), names["distill"]: (False, 4.0, "it broke")}
    monkeypatch.setattr(examples, "run", answers.__getitem__)
    monkeypatch.setattr("sys.argv", ["examples"])
    assert examples.main() == 1
    said = capsys.readouterr().out
    assert "it broke" in said
    assert "fine" not in said
    assert "make examples ARGS='distill'" in said
    monkeypatch.setattr("sys.argv", ["examples", "dpo"])
    assert examples.main() == 0


def test_main_when_a_name_is_mistyped_then_the_nearest_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["examples", "dpoo"])
    with pytest.raises(SystemExit):
        examples.main()
    assert "did you mean 'dpo'" in capsys.readouterr().err
