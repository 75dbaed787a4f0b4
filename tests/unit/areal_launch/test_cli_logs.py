"""`areal logs`: how many lines it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.errors import InvalidInput
from areal_launch.commands.dead_letters import list_dead_letters
from areal_launch.commands.inspect import show_logs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "stack.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "buffer.log").write_text("one\ntwo\nthree\n")
    return tmp_path


@pytest.mark.parametrize(("lines", "shown"), [(0, []), (2, ["two", "three"]), (1_000_000, None)])
def test_logs_when_a_number_of_lines_is_given_then_so_many_at_most(
    run: Path, lines: int, shown: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_logs(run, None, follow=False, lines=lines) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == (["one", "two", "three"] if shown is None else shown)


@pytest.mark.parametrize("lines", [-5, 10**20])
def test_logs_when_the_number_makes_no_sense_then_one_line(run: Path, lines: int) -> None:
    with pytest.raises(InvalidInput, match=f"^--lines {lines}: expected 0 to 1,000,000$"):
        show_logs(run, None, follow=False, lines=lines)


@pytest.mark.parametrize("limit", [0, 10**20])
def test_dead_letters_when_the_limit_makes_no_sense_then_one_line(run: Path, limit: int) -> None:
    with pytest.raises(InvalidInput, match=f"^--limit {limit}: expected 1 to 1,000,000$"):
        list_dead_letters(run, limit, as_json=False)
