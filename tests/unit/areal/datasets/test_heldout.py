"""Held-out rows: none of them is trained on, whatever the data looks like."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.datasets.heldout import hold_out, train_and_heldout
from areal.datasets.rows import load_rows
from areal.errors import InvalidInput

ROWS = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(500)]


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answered(text: str, answer: str) -> list[dict[str, str]]:
    return [*user(text), {"role": "assistant", "content": answer}]


# Two rows each that ask the same, with other answers, in the forms of common datasets.
SAME = [
    ({"question": "a?", "answer": "1"}, {"question": "a?", "answer": "2"}),
    ({"messages": answered("a?", "1")}, {"messages": answered("a?", "2")}),
    ({"messages": user("a?"), "answer": "1"}, {"messages": user("a?"), "answer": "2"}),
    (
        {"prompt": "a?", "chosen": "1", "rejected": "2"},
        {"prompt": "a?", "chosen": answered("a?", "3"), "rejected": answered("a?", "4")},
    ),
    (
        {"chosen": answered("a?", "1"), "rejected": answered("a?", "2")},
        {"chosen": answered("a?", "3"), "rejected": answered("a?", "4")},
    ),
    ({"instruction": "a", "input": "b", "output": "1"}, {"instruction": "a", "input": "b"}),
    (
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "1"}]},
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "2"}]},
    ),
    ({"text": "a"}, {"text": "a"}),
    (
        {"prompt": "squares?", "images": [b"\x89PNG"]},
        {"prompt": "squares?", "images": [b"\x89PNG"]},
    ),
]


def test_file_when_its_test_split_is_asked_for_then_refused_in_one_line(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert load_rows(file, "train") == load_rows(file) == ROWS
    with pytest.raises(InvalidInput, match=r"single file has no split 'test'.*train_and_heldout"):
        load_rows(file, "test")
    named = write(tmp_path / "test.jsonl", ROWS)
    assert load_rows(named, "test") == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "test.jsonl", "train.jsonl", "test/rows.jsonl"])
def test_file_when_rows_are_held_out_then_none_is_trained_on(tmp_path: Path, name: str) -> None:
    train, heldout = train_and_heldout(write(tmp_path / name, ROWS), 200)
    assert (len(train), len(heldout)) == (300, 200)
    assert not [row for row in heldout if row in train]
    assert [row for row in ROWS if row in train] == train


@pytest.mark.parametrize("split", ["train.jsonl", "train/0.jsonl"])
def test_folder_when_without_a_test_split_then_rows_are_held_out_of_train(
    tmp_path: Path, split: str
) -> None:
    write(tmp_path / split, ROWS)
    train, heldout = train_and_heldout(tmp_path, 20)
    assert (len(train), len(heldout)) == (480, 20)
    assert not [row for row in heldout if row in train]


def test_folder_when_with_a_test_split_then_its_first_rows_are_held_out(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:400])
    write(tmp_path / "test.jsonl", ROWS[400:])
    assert train_and_heldout(tmp_path, 60) == (ROWS[:400], ROWS[400:460])
    assert train_and_heldout(tmp_path, 100) == (ROWS[:400], ROWS[400:])
    assert train_and_heldout(tmp_path, 0) == (ROWS[:400], [])
    with pytest.raises(InvalidInput, match=r"heldout_rows=101: split 'test' .* has 100 rows"):
        train_and_heldout(tmp_path, 101)


def test_folder_when_its_splits_overlap_then_the_rows_are_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "train.jsonl", ROWS[:400])
    write(tmp_path / "test.jsonl", ROWS[390:])
    train, heldout = train_and_heldout(tmp_path, 50)
    assert (train, heldout) == (ROWS[:390], ROWS[390:440])
    assert "10 of 400 training rows are left out" in caplog.text
    write(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(InvalidInput, match="ask the same"):
        train_and_heldout(tmp_path, 500)


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (60, r"heldout_rows=60: there are 60 rows: expected fewer than 60"),
        (200, r"heldout_rows=200: there are 60 rows: expected fewer than 60"),
        (-1, r"heldout_rows=-1: expected 0 or more"),
    ],
)
def test_hold_out_when_more_than_there_are_then_one_line_names_both_numbers(
    tmp_path: Path, count: int, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        train_and_heldout(write(tmp_path / "rows.jsonl", ROWS[:60]), count)


def test_hold_out_when_none_then_all_rows_are_for_training() -> None:
    assert hold_out(ROWS, 0) == (ROWS, [])
    assert hold_out([], 0) == ([], [])


def test_hold_out_when_all_rows_ask_the_same_then_refused() -> None:
    rows = [{"prompt": "squares?", "answer": str(n)} for n in range(9)]
    with pytest.raises(InvalidInput, match=r"heldout_rows=3: the 9 rows ask 1 different"):
        hold_out(rows, 3)


@pytest.mark.parametrize("pair", SAME)
def test_hold_out_when_two_rows_ask_the_same_then_they_share_a_part(
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    others = [dict.fromkeys(pair[0], f"{n}") for n in range(40)]
    for count in range(2, 41, 2):
        train, heldout = hold_out([*pair, *others], count)
        assert {row in train for row in pair} in ({True}, {False})
        assert len(train) + len(heldout) == 42


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=2, max_size=60),
    st.integers(1, 59),
    st.randoms(),
)
@settings(deadline=None)
def test_hold_out_when_rows_are_shuffled_then_the_same_rows_are_held_out(
    pairs: list[tuple[int, int]], count: int, order: random.Random
) -> None:
    rows = [{"question": str(asked), "answer": str(answer)} for asked, answer in pairs]
    try:
        train, heldout = hold_out(rows, count)
    except InvalidInput:
        return
    assert 0 < len(heldout) <= count
    assert not {row["question"] for row in train} & {row["question"] for row in heldout}
    shuffled = list(rows)
    order.shuffle(shuffled)

    def as_set(part: list[dict[str, Any]]) -> list[str]:
        return sorted(map(repr, part))

    again = hold_out(shuffled, count)
    assert (as_set(again[0]), as_set(again[1])) == (as_set(train), as_set(heldout))
    assert as_set([*train, *heldout]) == as_set(rows)
