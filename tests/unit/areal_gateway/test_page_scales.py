"""The page's own arithmetic, run by a JavaScript engine."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import quickjs

import areal_gateway

SOURCE = Path(areal_gateway.__file__).parent / "static" / "scales.js"


def run(expression: str) -> Any:
    """What an expression over the functions of scales.js is."""
    context = quickjs.Context()
    context.eval(SOURCE.read_text().replace("export function", "function"))
    return json.loads(context.eval(f"JSON.stringify({expression})"))


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (1, 15, 6, [5, 10, 15]),
        (0, 15, 6, [0, 5, 10, 15]),
        (1, 60, 6, [10, 20, 30, 40, 50, 60]),
        (1, 4, 6, [1, 2, 3, 4]),
        (1, 2, 6, [1, 2]),
        (1, 20, 8, [5, 10, 15, 20]),
        (1, 1000, 4, [250, 500, 750, 1000]),
        (3, 3, 4, [3]),
    ],
)
def test_ticks_when_of_steps_then_whole_and_evenly_spaced(low, high, count, expected):
    assert run(f"ticks({low}, {high}, {count}, true)") == expected


def test_ticks_when_of_any_number_of_steps_then_none_is_a_fraction():
    for count in range(2, 15):
        for marks in run(f"Array.from({{length: 400}}, (_, i) => ticks(1, i + 2, {count}, true))"):
            assert marks
            assert all(isinstance(mark, int) for mark in marks)
            assert len({b - a for a, b in pairwise(marks)}) <= 1
            assert len(marks) <= count + 1


def test_ticks_when_of_rewards_then_fractions_as_before():
    assert run("ticks(0, 1, 4)") == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.12, 0.20], 0.1136, 0.2064),  # not 0 to 1: the curve fills the chart
        ([0.0, 1.0], 0, 1),
        ([0.02, 0.95], 0, 1),
        ([-1.0, 1.0], -1.16, 1),
        ([10, 30], 8.4, 31.6),
        ([0.5], 0.45, 0.55),
        ([0.0], 0, 1),
        ([1.0, 1.0], 0.9, 1),
    ],
)
def test_fit_when_given_rewards_then_around_them_and_within_what_they_can_be(values, low, high):
    assert run(f"fit({values})") == pytest.approx([low, high])


def test_fit_when_there_is_nothing_then_still_an_axis():
    assert run("fit([])") == [0, 1]


@pytest.mark.parametrize(
    ("step", "digits"), [(1, 0), (20, 0), (0.5, 1), (0.25, 2), (0.02, 2), (0.001, 3), (0.0025, 4)]
)
def test_decimals_when_marks_lie_so_far_apart_then_enough_to_tell_them_apart(step, digits):
    assert run(f"decimals({step})") == digits


def test_held_out_when_measured_several_times_then_a_line_for_each_set():
    told = [
        {"name": "heldout_before", "step": 0, "mean_reward": 0.1},
        {"name": "gsm8k", "step": 20, "mean_reward": 0.3},
        {"name": "heldout_after", "step": 40, "mean_reward": 0.8},
        {"name": "gsm8k", "step": 10, "mean_reward": 0.2},
        {"name": "gsm8k", "step": 10, "mean_reward": 0.25},
    ]
    assert run(f"heldOut({json.dumps(told)})") == {
        "heldout": [[0, 0.1], [40, 0.8]],
        "gsm8k": [[10, 0.25], [20, 0.3]],
    }


def test_over_rows_when_the_last_of_a_line_is_incomplete_then_says_of_how_many():
    told = json.dumps(
        [
            {"name": "heldout_before", "rows": 12, "failed": 0},
            {"name": "heldout_after", "rows": 9, "failed": 3},
            {"name": "gsm8k", "rows": 12, "failed": 0},
            {"name": "older"},
        ]
    )
    assert run(f"overRows({told}, 'heldout')") == " (9 of 12 rows)"
    assert run(f"overRows({told}, 'gsm8k')") == " (12 rows)"
    assert run(f"overRows({told}, 'older')") == ""
