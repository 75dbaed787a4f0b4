"""The groups of a step as the batch that a recipe gets."""

import pytest
import torch
from tests.ledger_support import make_group

from areal.types import StopReason
from areal_torch.algorithms.packing import pack, pack_groups


@pytest.mark.parametrize(
    ("reason", "truncated"),
    [
        (StopReason.STOP, False),
        (StopReason.TOOL_CALLS, False),
        (StopReason.LENGTH, True),
        (StopReason.ABORT, True),
    ],
)
def test_pack_groups_when_a_trajectory_ended_then_only_what_was_cut_off_is_truncated(
    reason, truncated
):
    group = make_group("t", samples=2)
    group.trajectories[1].finish_reason = reason
    batch = pack_groups([group])
    assert batch["truncated"].tolist() == [False, truncated]


def test_pack_groups_when_every_reason_is_asked_then_it_is_known():
    """A new reason must be sorted into finished or cut off."""
    assert set(StopReason) == {"stop", "length", "abort", "tool_calls"}


def test_pack_groups_when_groups_differ_in_size_then_it_is_pack_of_their_trajectories():
    groups = [make_group("a", samples=3), make_group("b", samples=1), make_group("c", samples=2)]
    groups[1].trajectories[0].rewards[-1] = 0.5
    keys = ("input_ids", "loss_mask", "behavior_logprobs", "token_versions", "rewards")
    each = [{key: getattr(t, key) for key in keys} for g in groups for t in g.trajectories]
    expected = pack(each, [0, 0, 0, 1, 2, 2])
    batch = pack_groups(groups)
    assert batch.pop("truncated").shape == (6,)
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        assert batch[key].dtype == value.dtype
        assert torch.equal(batch[key], value)
