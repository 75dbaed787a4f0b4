"""What a person sees of a dead letter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.ledger_support import make_task

from areal.errors import InvalidInput, NotFound
from areal.protocol.leases import DeadLetter, TaskRecord
from areal.types import TaskState
from areal_launch.commands.dead_letters import (
    as_row,
    describe,
    drop_dead_letters,
    list_dead_letters,
    retry_dead_letters,
)


def letter(traceback: str) -> DeadLetter:
    record = TaskRecord(
        task=make_task("e0-17"),
        state=TaskState.DEAD_LETTERED,
        reason="workflow_error after 3 attempts: ZeroDivisionError: division by zero",
        attempts=3,
        infrastructure_attempts=1,
        submit_time=1000.0,
        end_time=2000.0,
        group=None,
        step=0,
    )
    return DeadLetter(record, "workflow_error", traceback)


def test_letter_when_short_then_cause_reason_and_the_whole_traceback() -> None:
    text = describe(
        as_row(letter("Traceback\n  File recipe.py, line 3\nZeroDivisionError\n")), 2090.0
    )
    assert text.splitlines() == [
        "e0-17   workflow_error, 4 attempts, 2 min ago",
        "    workflow_error after 3 attempts: ZeroDivisionError: division by zero",
        "      Traceback",
        "        File recipe.py, line 3",
        "      ZeroDivisionError",
    ]


def test_letter_when_its_traceback_is_long_then_its_end_and_how_much_is_missing() -> None:
    text = describe(as_row(letter("\n".join(f"line {i}" for i in range(40)))), 2000.0)
    assert "      … 28 earlier lines; --json has them\n      line 28\n" in text
    assert text.endswith("line 39")


@pytest.mark.parametrize(("task_ids", "everything"), [([], False), (["a"], True)])
def test_drop_when_neither_or_both_are_said_then_refused(
    task_ids: list[str], everything: bool
) -> None:
    with pytest.raises(InvalidInput, match="expected task ids, or --all"):
        drop_dead_letters(Path("nowhere"), task_ids, everything=everything, as_json=False)


def ended(folder: Path, state: str) -> Path:
    """A run with a ledger of its own that no longer runs."""
    folder.mkdir(parents=True)
    (folder / "stack.json").write_text(json.dumps({"state": state, "processes": {"buffer": {}}}))
    return folder


@pytest.mark.parametrize("named", [True, False])
def test_list_when_the_run_has_ended_and_left_none_then_it_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: bool,
) -> None:
    folder = ended(tmp_path / "runs" / "sums" / "t0", "stopped")
    monkeypatch.chdir(tmp_path)
    assert list_dead_letters(folder if named else None, 20, as_json=False) == 0
    assert capsys.readouterr().out == "no dead letters\n"


def test_list_when_the_run_was_killed_then_its_dead_letters_are_not_said_to_be_none(
    tmp_path: Path,
) -> None:
    folder = ended(tmp_path / "run", "ready")
    with pytest.raises(NotFound, match="was killed before it wrote its dead letters; run it again"):
        list_dead_letters(folder, 20, as_json=False)


def test_retry_when_the_run_has_ended_then_one_line_says_so(tmp_path: Path) -> None:
    folder = ended(tmp_path / "run", "stopped")
    with pytest.raises(NotFound, match="run: not running; run it again"):
        retry_dead_letters(folder, ["e0-3"], as_json=False)


def test_list_when_the_run_has_ended_then_it_prints_what_the_run_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "sums" / "t0"
    folder.mkdir(parents=True)
    (folder / "stack.json").write_text("{}")
    row = {
        "task_id": "e0-3",
        "purpose": "train",
        "cause": "workflow_error",
        "reason": "workflow_error after 3 attempts: KeyError: 'solution' (mine.py:41)",
        "attempts": 3,
        "infrastructure_attempts": 0,
        "end_time": 2000.0,
        "data": {"answer": "7"},
        "traceback": "Traceback\n  File mine.py, line 41\n",
    }
    lines = [json.dumps({**row, "task_id": f"e0-{number}"}) for number in (3, 2, 1)]
    (folder / "dead_letters.jsonl").write_text("\n".join(lines) + "\n")
    assert list_dead_letters(folder, 2, as_json=False) == 0
    told = capsys.readouterr().out
    assert f"{folder} has ended; its dead letters were:" in told
    assert told.index("e0-3   workflow_error, 3 attempts") < told.index("e0-2   workflow_error")
    assert "KeyError: 'solution' (mine.py:41)" in told
    assert "e0-1 " not in told
    assert list_dead_letters(folder, 1, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == row
