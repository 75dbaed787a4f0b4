"""A reward's parts, from the function to the trajectory that is trained on."""

from __future__ import annotations

import pytest

from areal import LLMResponse, make_trajectory, rubric
from areal.clients.reward import score_from_pb
from areal.errors import InvalidInput
from areal.protocol.trajectories import pack_group, unpack_group
from areal.rewards.functions import outcome
from areal.types import Score, StopReason, TrajectoryGroup


def response(prompt: list[int], output: list[int]) -> LLMResponse:
    return LLMResponse(prompt, output, [-0.5] * len(output), [3] * len(output), StopReason.STOP)


def test_rubric_when_parts_have_weights_then_their_sum_and_the_parts_before_them():
    score = rubric(correct=True, short=(0.5, 0.2), polite=(1, -1.0))
    assert score == pytest.approx(0.1)
    assert score.parts == {"correct": 1.0, "short": 0.5, "polite": 1.0}
    assert (score * 0.5, (0.5 * score).parts) == (pytest.approx(0.05), score.parts)
    assert type(score + 1) is float


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "rubric: expected at least one part"),
        ({"short": None}, r"rubric short None: expected a finite number, or \(number, weight\)"),
        ({"short": float("nan")}, "rubric short nan: expected"),
        ({"short": (1.0, float("inf"))}, r"rubric short \(1.0, inf\): expected"),
        ({"short": (1, 2, 3)}, r"rubric short \(1, 2, 3\): expected"),
        ({"mean": 1}, "rubric mean: expected another name: reward/mean is taken"),
        ({"timeouts": 1}, "rubric timeouts: expected another name"),
    ],
)
def test_rubric_when_a_part_is_wrong_then_one_line_names_it(parts, said):
    with pytest.raises(InvalidInput, match=said):
        rubric(**parts)


def test_rubric_when_a_part_could_not_be_judged_then_its_timeout_is_kept():
    costly = Score(0.0, {"timeouts": 1.0})
    assert rubric(right=costly, also=(costly, 0.5)).parts == {
        "right": 0.0,
        "also": 0.0,
        "timeouts": 1.0,
    }
    assert "timeouts" not in rubric(right=Score(1.0, {"short": 1.0})).parts


def test_parts_when_a_reward_travels_then_the_trainer_gets_them():
    scored = score_from_pb(outcome("f", rubric(correct=1.0, short=(0.5, 2))))
    assert isinstance(scored, Score)
    assert type(score_from_pb(outcome("f", 1.0))) is float
    plain = make_trajectory(response([1], [2]), 1.0)
    one = make_trajectory(response([1], [2, 3]), scored)
    turns = [response([1], [2]), response([1, 2, 5], [6])]
    two = make_trajectory(turns, [scored, rubric(correct=0.25)])
    group = unpack_group(pack_group(TrajectoryGroup("t", [plain, one, two])))
    assert [each.reward for each in group.trajectories] == [1.0, 2.0, 2.25]
    assert [each.reward_parts for each in group.trajectories] == [
        {},
        {"correct": 1.0, "short": 0.5},
        {"correct": 1.25, "short": 0.5},
    ]
