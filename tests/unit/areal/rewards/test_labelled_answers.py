"""Built-in rewards and the judge's parser agree with answers that a person has labeled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal.rewards.judge_score import read_score
from areal.rewards.math import math_reward
from areal.rewards.multiple_choice import multiple_choice_reward

FOLDER = Path(__file__).parent / "labelled"
RECALL = 0.99


def labelled(name: str) -> Iterator[tuple[str, bool, str]]:
    """(what is right, whether the text says so, text) of each line of a file."""
    group = ""
    for line in (FOLDER / f"{name}.txt").read_text("utf-8").split("\n"):
        if line.startswith("= "):
            group = line[2:]
        elif line[:1] in ("+", "-") and not line.startswith("#"):
            yield group, line[0] == "+", line[2:].replace("⏎", "\n")


def math(group: str, text: str) -> bool:
    return math_reward(text, group) == 1.0


def choice(group: str, text: str) -> bool:
    letter, *options = (part.strip() for part in group.split("|"))
    return multiple_choice_reward(text, letter, options) == 1.0


@pytest.mark.parametrize(("name", "says"), [("math", math), ("multiple_choice", choice)])
def test_reward_when_answers_are_labeled_then_99_percent_are_found_and_none_is_wrongly_right(
    name: str, says: Callable[[str, str], bool]
) -> None:
    rows = list(labelled(name))
    found = [(right, says(group, text)) for group, right, text in rows]
    hits = sum(right and said for right, said in found)
    wrong = [row for row, (right, said) in zip(rows, found, strict=True) if said and not right]
    missed = [row for row, (right, said) in zip(rows, found, strict=True) if right and not said]
    rights = sum(right for right, _ in found)
    print(
        f"{name}: {len(rows)} answers, precision {hits / (hits + len(wrong)):.4f}, "
        f"recall {hits / rights:.4f}; missed: {missed}"
    )
    assert len(rows) >= 400
    assert not wrong
    assert hits / rights >= RECALL, missed


def test_judge_score_when_answers_are_labeled_then_99_percent_are_read_and_none_wrongly() -> None:
    rows = list(labelled("judge"))
    hits, wrong, missed = 0, [], []
    for group, _, text in rows:
        share, _, best = group.partition(" best=")
        try:
            score: float | None = read_score(text, float(best or 10))
        except ValueError:
            score = None
        expected = None if share == "none" else float(share)
        hits += score is not None and score == expected
        if score is not None and score != expected:
            wrong.append((group, text, score))
        if score is None and expected is not None:
            missed.append((group, text))
    print(
        f"judge: {len(rows)} answers, precision {hits / (hits + len(wrong)):.4f}, "
        f"recall {hits / (hits + len(missed)):.4f}; missed: {missed}"
    )
    assert len(rows) >= 400
    assert not wrong
    assert hits / (hits + len(missed)) >= RECALL, missed
