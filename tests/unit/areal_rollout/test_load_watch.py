"""What the recommendation rests on is said where the trainer cannot be reached."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from areal.clients.trainer import TrainerStatus
from areal.errors import Unavailable
from areal_rollout.load_watch import LoadWatch
from areal_rollout.metrics import RolloutMetrics

AWAY = Unavailable("areal-trainer:50051: nothing answers")


class Trainer:
    """Says what it is given, one after the other."""

    def __init__(self, *answers: TrainerStatus | Unavailable) -> None:
        self._answers = list(answers)

    async def get_status(self, after_step: int = 0, max_wait_s: float = 0.0) -> TrainerStatus:
        del after_step, max_wait_s
        answer = self._answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer


def status(step: int) -> TrainerStatus:
    return TrainerStatus("training", step, 100, 1, 1, "")


async def watched(trainer: Trainer | None, polls: int) -> tuple[list[float | None], list[str]]:
    """`areal_rollout_training_known` after each poll, and what the log said."""
    registry = CollectorRegistry()
    known = []
    with capture_logs() as logs:
        watch = LoadWatch(
            trainer,
            servers=lambda: 1,
            generating_s=lambda: 0.0,
            report=RolloutMetrics(registry).recommended,
        )
        for poll in range(polls):
            await watch.read_rows()
            watch.sample(float(poll))
            known.append(registry.get_sample_value("areal_rollout_training_known"))
    return known, [each["event"] for each in logs]


async def test_load_when_the_trainer_is_unreachable_then_it_is_said_once_and_the_metric_is_0():
    trainer = Trainer(AWAY, AWAY, AWAY, status(3), status(4), AWAY)
    known, said = await watched(trainer, 6)
    assert known == [0, 0, 0, 1, 1, 0]
    assert said == ["trainer_unreachable", "trainer_reachable", "trainer_unreachable"]


async def test_load_when_there_is_no_trainer_then_nothing_is_known_and_nothing_is_missed():
    assert await watched(None, 2) == ([0, 0], [])
