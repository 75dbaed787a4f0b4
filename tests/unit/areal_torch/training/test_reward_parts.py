"""Parts of rewards become metrics of a step: means, except those that count trajectories."""

from __future__ import annotations

from tests.unit.areal.runs.test_kept_rollouts import group

from areal_torch.training.batch_rewards import describe_rewards


def test_parts_when_they_count_trajectories_then_summed_and_else_averaged() -> None:
    groups = [group("a", 1.0, 0.0), group("b", 1.0, 0.0)]
    a, b = groups[0].trajectories
    a.reward_parts.update({"correct": 1.0, "splits": 1.0, "timeouts": 1.0})
    b.reward_parts.update({"correct": 0.0, "splits": 1.0})
    row = describe_rewards(groups, world_size=1)
    assert row["reward/correct"] == 0.5
    assert row["rollout/splits"] == 2.0
    assert row["reward/timeouts"] == 1.0


def test_splits_when_conversations_split_then_counted_by_field_with_the_earliest_message() -> None:
    groups = [group("a", 1.0, 0.0), group("b", 1.0, 0.0), group("c", 1.0, 0.0)]
    paths = ["messages[4].content", "messages[2].content", "tools"]
    for each, path in zip(groups, paths, strict=True):
        each.trajectories[0].split = path
    row = describe_rewards(groups, world_size=1)
    assert {name: row[name] for name in row if name.startswith("rollout/splits")} == {
        "rollout/splits": 0.0,
        "rollout/splits/content": 2,
        "rollout/splits/tools": 1,
        "rollout/splits_message": 2,
    }


def test_counts_when_nothing_is_counted_then_0_in_each_row() -> None:
    row = describe_rewards([group("a", 1.0, 0.0)], world_size=1)
    assert (row["reward/timeouts"], row["rollout/splits"]) == (0.0, 0.0)
    assert describe_rewards([], world_size=1) == {}
