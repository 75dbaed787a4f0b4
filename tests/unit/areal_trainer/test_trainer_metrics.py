"""What an alert on a stalled trainer goes by."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from areal.runs.status import TrainerStatus
from areal_trainer.metrics import TrainerCollector


def test_unfinished_when_a_step_ends_then_it_counts_from_there(monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    registry, status = CollectorRegistry(), TrainerStatus(total_steps=10, world_size=1)
    TrainerCollector(status, registry)

    def unfinished() -> float | None:
        return registry.get_sample_value("areal_trainer_unfinished_seconds")

    now[0] += 40
    assert unfinished() == 40
    status.opened(1, 0, [])
    now[0] += 30
    assert unfinished() == 30
    status.finished_step(1, {"step": 1, "time/step": 30.0})
    now[0] += 7
    assert unfinished() == 7
