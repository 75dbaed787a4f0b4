"""Routes of a trajectory: those of each token's own call, through turns, branches and packing."""

import numpy as np
import torch

from areal.agents.tree import Call, merge
from areal.types import LLMResponse, StopReason, TrajectoryGroup
from areal.workflows.base import make_trajectory
from areal_torch.algorithms.packing import ROUTES, pack_groups, select


def turn(prompt, output, mark, rows=None, layers=2):
    """A call whose server chose expert `mark` for each of its tokens but the last."""
    response = LLMResponse(
        list(prompt), list(output), [-1.0] * len(output), [0] * len(output), StopReason.STOP
    )
    if mark is not None:
        rows = len(prompt) + len(output) - 1 if rows is None else rows
        response.routed_experts = np.full((rows, layers, 2), mark, dtype=np.uint8)
    return response


def marks(trajectory):
    routes = trajectory.routed_experts
    return None if routes is None else routes[:, 0, 0].tolist()


def test_trajectory_when_it_has_turns_then_each_token_has_the_experts_of_its_first_call():
    turns = [turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6, 7], 8)]
    assert marks(make_trajectory(turns, 1.0)) == [5, 5, 5, 8, 8, 8]


def test_trajectory_when_only_a_later_turn_has_routes_then_it_tells_of_all_tokens():
    turns = [turn([1, 2], [3, 4], None), turn([1, 2, 3, 4, 9], [6, 7], 8)]
    assert marks(make_trajectory(turns, 1.0)) == [8] * 6


def test_trajectory_when_a_later_turn_has_none_then_its_tokens_have_none():
    turns = [turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6, 7], None)]
    assert marks(make_trajectory(turns, 1.0)) == [5, 5, 5]


def test_trajectory_when_no_turn_has_routes_then_there_are_none():
    assert make_trajectory(turn([1, 2], [3, 4], None), 1.0).routed_experts is None


def test_trajectory_when_an_answer_was_cut_then_routes_beyond_its_end_are_dropped():
    assert marks(make_trajectory(turn([1, 2], [3, 4], 5, rows=9), 1.0)) == [5] * 4


def test_trajectory_when_turns_are_of_other_models_then_the_first_counts():
    turns = [turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6, 7], 8, layers=3)]
    assert marks(make_trajectory(turns, 1.0)) == [5, 5, 5]


def test_session_when_calls_branch_then_each_branch_has_the_routes_of_its_calls():
    calls = [
        Call(turn([1, 2], [3, 4], 5)),
        Call(turn([1, 2, 3, 4, 9], [6, 7], 6)),
        Call(turn([1, 2, 3, 4, 8], [6], 7)),
    ]
    one, two = merge(calls, 1.0).trajectories
    assert marks(one) == [5, 5, 5, 6, 6, 6]
    assert marks(two) == [7] * 5


def test_pack_when_some_trajectories_have_routes_then_the_other_tokens_have_minus_one():
    whole = make_trajectory(turn([1, 2], [3, 4], 5), 1.0)
    none = make_trajectory(turn([1, 2], [3, 4, 5], None), 1.0)
    other = make_trajectory(turn([1, 2], [3], 5, layers=3), 1.0)
    batch = pack_groups([TrajectoryGroup("a", [whole, none]), TrajectoryGroup("b", [other])])
    assert batch[ROUTES].dtype == torch.int16
    assert batch[ROUTES].shape == (12, 2, 2)
    assert batch[ROUTES][:, 1, 1].tolist() == [5, 5, 5] + [-1] * 9
    assert select(batch, [2, 0])[ROUTES][:, 0, 0].tolist() == [-1] * 3 + [5, 5, 5, -1]


def test_pack_when_no_trajectory_has_routes_then_the_batch_has_none():
    none = make_trajectory(turn([1, 2], [3, 4, 5], None), 1.0)
    assert ROUTES not in pack_groups([TrajectoryGroup("a", [none])])
