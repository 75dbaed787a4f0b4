"""The rewards of a batch, as a train step's row has them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from areal.types import SPLITS, TIMEOUTS, TrajectoryGroup, split_field, split_message
from areal_torch.training.ranks import gather_json

_COUNTED = {TIMEOUTS: "reward/timeouts", SPLITS: "rollout/splits"}


def describe_rewards(groups: Sequence[TrajectoryGroup], world_size: int) -> dict[str, float]:
    """Describes the rewards of a batch and their parts, on all ranks alike. Collective.

    A part is a mean over the trajectories that have it. Those of `_COUNTED` are sums, and 0 if no
    trajectory has them: only the trajectories that are counted do. An update of the actor describes
    the rewards that it used.

    Args:
        groups: This rank's share of the batch; may be empty.
        world_size: How many ranks call this.

    Returns:
        `reward/mean`, `reward/std` (of a sample), `reward/lowest`, `reward/highest` and the names
        in `_COUNTED`, unless the batch is empty; `reward/PART`; and, if conversations split,
        `rollout/splits/FIELD` and `rollout/splits_message`.
    """
    trajectories = [each for group in groups for each in group.trajectories]
    mine: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            total = mine.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + value, total[1] + 1
    splits = [each.split for each in trajectories if each.split]
    own: Any = [[float(each.reward) for each in trajectories], mine, splits]
    rewards: list[float] = []
    changed: list[str] = []
    sums: dict[str, list[float]] = {}
    for there, parts, paths in [own] if world_size == 1 else gather_json(own):
        rewards, changed = rewards + there, changed + paths
        for name, (value, count) in parts.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + value, total[1] + count
    found: dict[str, float] = {}
    if rewards:
        mean = sum(rewards) / len(rewards)
        squares = sum((each - mean) ** 2 for each in rewards)
        found = {
            "reward/mean": mean,
            "reward/std": math.sqrt(squares / max(len(rewards) - 1, 1)),
            "reward/lowest": min(rewards),
            "reward/highest": max(rewards),
            **dict.fromkeys(_COUNTED.values(), 0.0),
        }
    for field, count in Counter(map(split_field, changed)).items():
        found[f"rollout/splits/{field}"] = count
    if numbers := [at for path in changed if (at := split_message(path)) is not None]:
        found["rollout/splits_message"] = min(numbers)
    return found | {
        _COUNTED.get(name, f"reward/{name}"): value if name in _COUNTED else value / count
        for name, (value, count) in sorted(sums.items())
    }
