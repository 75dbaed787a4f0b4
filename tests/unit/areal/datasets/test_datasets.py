"""Rows from files and generators, and the loader that walks over them."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.datasets.arithmetic import addition
from areal.datasets.gsm8k import gsm8k_row
from areal.datasets.jsonl import load_jsonl
from areal.datasets.loader import StatefulLoader
from areal.errors import InvalidInput


def test_jsonl_when_lines_are_objects_then_rows_in_order(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": "\u00fc"}\n')
    assert load_jsonl(file) == [{"a": 1}, {"a": "\u00fc"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"rows\.jsonl:2: not JSON"),
        ('{"a": 1}\n\n[1]\n', r"rows\.jsonl:3: expected a JSON object, got list"),
        ("\n", "has no rows"),
    ],
)
def test_jsonl_when_a_line_is_malformed_then_its_number_is_named(tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        load_jsonl(file)


def test_jsonl_when_file_is_missing_then_path_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"nowhere\.jsonl.*No such file"):
        load_jsonl(tmp_path / "nowhere.jsonl")


def _question(row):
    return row["messages"][0]["content"]


@given(digits=st.integers(1, 5), seed=st.integers(0, 5))
def test_addition_when_split_then_parts_share_no_sum_in_any_order(digits, seed):
    train, heldout = addition(digits, train=60, heldout=21, seed=seed)
    assert (len(train), len(heldout)) == (60, 21)
    pairs = []
    for part in (train, heldout):
        operands = [tuple(map(int, _question(row).rstrip("=").split("+"))) for row in part]
        assert len(set(operands)) == len(part)
        assert all(row["answer"] == str(a + b) for row, (a, b) in zip(part, operands, strict=True))
        assert all(len(str(x)) == digits for pair in operands for x in pair)
        pairs.append({tuple(sorted(pair)) for pair in operands})
    assert not pairs[0] & pairs[1]


def test_addition_when_arguments_are_the_same_then_rows_are():
    assert addition(2, train=50, heldout=10, seed=3) == addition(2, train=50, heldout=10, seed=3)
    assert addition(2, train=50, heldout=10, seed=3) != addition(2, train=50, heldout=10, seed=4)
    # More training rows leave the evaluation alone.
    few, many = (addition(2, train=n, heldout=10, seed=3)[1] for n in (50, 500))
    assert few == many


def test_addition_when_there_are_too_few_problems_then_it_says_so():
    train, _ = addition(1, train=100, heldout=0, seed=0)
    assert len({_question(row) for row in train}) == 100
    with pytest.raises(InvalidInput, match="only 100 1-digit problems"):
        addition(1, train=90, heldout=11, seed=0)
    with pytest.raises(InvalidInput, match="digits=0"):
        addition(0, train=1, heldout=1, seed=0)


def test_gsm8k_when_answer_has_marks_then_number_is_bare():
    row = gsm8k_row({"question": "How many?", "answer": "6 * 200 = 1200\n#### 1,200"})
    assert row["answer"] == "1200"
    assert row["solution"] == "6 * 200 = 1200"
    assert row["messages"][0]["content"].startswith("How many?\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "'answer'"),
        ({"question": 1, "answer": "#### 1"}, "'question'"),
        ({"question": "q", "answer": "it is 5"}, "#### N"),
        ({"question": "q", "answer": "####  "}, "#### N"),
    ],
)
def test_gsm8k_when_row_is_another_then_field_is_named(row, message):
    with pytest.raises(InvalidInput, match=message):
        gsm8k_row(row)


ROWS = [{"n": n} for n in range(10)]


@given(seed=st.integers(0, 99), shuffle=st.booleans(), start=st.integers(0, 25))
def test_loader_when_resumed_anywhere_then_goes_on_exactly(seed, shuffle, start):
    whole = list(islice(StatefulLoader(ROWS, seed=seed, shuffle=shuffle), 40))
    resumed = StatefulLoader(ROWS, seed=seed, shuffle=shuffle)
    resumed.seek(*whole[start][:2])
    assert list(islice(resumed, 10)) == whole[start : start + 10]
    resumed.seek(0, len(ROWS))  # where an epoch ends, the next begins
    assert next(resumed) == whole[len(ROWS)]


@given(seed=st.integers(0, 99))
def test_loader_when_an_epoch_passes_then_each_row_came_once(seed):
    loader = StatefulLoader(ROWS, seed=seed)
    orders = []
    for epoch in range(3):
        items = list(islice(loader, len(ROWS)))
        assert [(e, i) for e, i, _ in items] == [(epoch, i) for i in range(10)]
        orders.append([row["n"] for _, _, row in items])
        assert sorted(orders[-1]) == list(range(10))
    assert orders[0] != orders[1] or orders[1] != orders[2]


def test_loader_when_not_shuffled_then_file_order():
    assert [row["n"] for _, _, row in islice(StatefulLoader(ROWS, shuffle=False), 12)] == [
        *range(10),
        0,
        1,
    ]


@pytest.mark.parametrize("place", [(-1, 0), (0, -1), (0, 11)])
def test_loader_when_place_is_outside_then_it_says_so(place):
    with pytest.raises(InvalidInput, match="dataset position"):
        StatefulLoader(ROWS).seek(*place)
    with pytest.raises(InvalidInput, match="has no rows"):
        StatefulLoader([])
