"""What a rollout worker counts of conversations that split."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry

from areal.types import Trajectory
from areal_rollout.metrics import RolloutMetrics

NONE = np.zeros(0, np.int32)


def trajectory(split: str) -> Trajectory:
    nothing = NONE.astype(np.float32)
    return Trajectory("t", NONE, NONE.astype(np.bool_), nothing, NONE, nothing, split=split)


def test_conversations_when_they_split_then_counted_by_field_and_only_by_known_ones() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics(registry)
    paths = ["", "messages[0].content", "messages[7].content", "tools", "who knows"]
    metrics.conversations_split([trajectory(each) for each in paths])
    name = "areal_rollout_conversation_splits_total"
    counted = {
        field: registry.get_sample_value(name, {"field": field})
        for field in ("content", "tools", "prompt", "role")
    }
    assert counted == {"content": 2, "tools": 1, "prompt": 1, "role": None}
