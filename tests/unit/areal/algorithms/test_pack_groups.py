"""The groups of a step as the batch that a recipe gets."""

import pytest
from tests.ledger_support import make_group

from areal.algorithms.packing import pack_groups
from areal.types import StopReason


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
