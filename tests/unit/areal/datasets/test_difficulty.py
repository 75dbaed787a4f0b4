"""Curriculum and difficulty filter: rows from easy to hard, and those worth their generation."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from areal.datasets.difficulty import CurriculumLoader, of_pass_rate
from areal.errors import InvalidInput

ROWS = [{"n": n, "hard": n % 3} for n in range(30)]


def loader(seed: int = 0, epochs: int = 1) -> CurriculumLoader:
    return CurriculumLoader(ROWS, lambda row: row["hard"], seed=seed, epochs=epochs)


def test_curriculum_when_read_then_the_first_epoch_rises_and_each_row_comes_once_an_epoch() -> None:
    items = list(islice(loader(), 60))
    first, second = items[:30], items[30:]
    assert [item[2]["hard"] for item in first] == [0] * 10 + [1] * 10 + [2] * 10
    assert [item[2]["n"] for item in first[:10]] != list(range(0, 30, 3)), "equal ones are shuffled"
    for epoch, part in enumerate((first, second)):
        assert [(e, i) for e, i, _ in part] == [(epoch, i) for i in range(30)]
        assert sorted(row["n"] for _, _, row in part) == list(range(30))
    hards = [item[2]["hard"] for item in second]
    assert hards != sorted(hards)


@pytest.mark.parametrize("place", [(0, 0), (0, 17), (0, 30), (1, 3), (2, 29)])
def test_curriculum_when_resumed_anywhere_then_continues_with_the_same_rows(
    place: tuple[int, int],
) -> None:
    whole = list(islice(loader(seed=3, epochs=2), 120))
    resumed = loader(seed=3, epochs=2)
    resumed.seek(*place)
    begin = place[0] * 30 + place[1]
    assert list(islice(resumed, 20)) == whole[begin : begin + 20]


def test_pass_rate_when_measured_then_rows_without_a_gradient_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "reward-v0.jsonl"
    rewards = {0: [0, 0], 1: [0, 1], 2: [1, 1], 4: [1, 0]}
    lines = [
        {"task_id": f"reward-v0-{n}", "data": {}, "answers": [{"reward": r} for r in each]}
        for n, each in rewards.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    assert of_pass_rate(ROWS, file) == [ROWS[1], ROWS[4]], "row 3 was not delivered"
    assert of_pass_rate(ROWS, file, least=0.0) == [ROWS[0], ROWS[1], ROWS[4]]
    with pytest.raises(InvalidInput, match=r"no row has a mean reward of 0\.6 to 0\.9"):
        of_pass_rate(ROWS, file, least=0.6, most=0.9)
    with pytest.raises(InvalidInput, match="has row 4, but there are 3 rows"):
        of_pass_rate(ROWS[:3], file)
    file.write_text('{"step": 1}\n')
    with pytest.raises(InvalidInput, match=r"reward-v0\.jsonl:1: expected a line of"):
        of_pass_rate(ROWS, file)
    with pytest.raises(InvalidInput, match="No such file"):
        of_pass_rate(ROWS, tmp_path / "none.jsonl")
