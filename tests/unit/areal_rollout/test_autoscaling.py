"""The recommended number of inference servers: a pure function, and its simulation."""

from __future__ import annotations

import pytest
from tools.autoscaling_simulation import WORLDS, World, simulate

from areal.clients.trainer import TrainerStatus
from areal.errors import Unavailable
from areal_rollout.autoscaling import TARGET, Load, Recommender, Sample
from areal_rollout.load_watch import LoadWatch


def steady(servers: int, work: float, train_s: float) -> Load:
    """The busy fractions of a training without noise, by the slower of both."""
    generate_s = work / servers
    step = max(generate_s, train_s)
    return Load(servers, generate_s / step, train_s / step)


@pytest.mark.parametrize("servers", [1, 2, 3, 8, 20, 100])
def test_wanted_when_servers_differ_then_it_is_the_same_number(servers):
    assert steady(servers, work=68.0, train_s=10.0).wanted == pytest.approx(6.8 / TARGET)


def feed(recommender: Recommender, load: Load, start: float, seconds: float) -> int:
    """Samples each 5 s, as a load of so much would give."""
    for tick in range(int(seconds / 5) + 1):
        passed = 5.0 * tick
        busy = load.generation_busy * passed
        recommender.observe(
            Sample(start + passed, load.servers, busy, load.training_busy * passed, passed)
        )
    return recommender.recommended


def test_recommendation_when_too_few_then_up_at_most_twofold():
    recommender = Recommender()
    assert feed(recommender, steady(2, 68.0, 10.0), 0.0, 120.0) == 4
    assert feed(recommender, steady(4, 68.0, 10.0), 200.0, 120.0) == 8


def test_recommendation_when_too_many_then_down_only_after_a_while():
    recommender = Recommender()
    load = steady(12, 68.0, 10.0)
    assert feed(recommender, load, 0.0, 40.0) == 0, "nothing is known yet"
    recommender = Recommender()
    assert feed(recommender, load, 0.0, 200.0) == 12
    recommender = Recommender()
    assert feed(recommender, load, 0.0, 400.0) == 8


def test_recommendation_when_it_fits_then_it_stays():
    recommender = Recommender()
    assert feed(recommender, steady(8, 68.0, 10.0), 0.0, 600.0) == 8
    assert feed(recommender, steady(8, 72.0, 10.0), 700.0, 600.0) == 8, "within the band"


def test_recommendation_when_no_server_serves_then_unchanged():
    recommender = Recommender()
    feed(recommender, steady(8, 68.0, 10.0), 0.0, 600.0)
    assert recommender.observe(Sample(700.0, 0, 0.0, 0.0, 0.0)) == 8


def test_recommendation_when_nothing_trains_then_generation_alone_counts():
    recommender = Recommender()
    for tick in range(100):
        recommender.observe(Sample(5.0 * tick, 4, 2.0 * tick, 0.0, 0.0))
    assert recommender.load == Load(4, pytest.approx(0.4), 1.0)
    assert recommender.recommended == 2


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_simulation_when_followed_then_it_converges_and_does_not_oscillate(world: World):
    for seed in range(3):
        result = simulate(world, seed)
        best = world.best_at(7200.0)
        assert abs(result.last - best) <= max(2.0, 0.3 * best), (seed, result.last, best)
        assert result.settled_s < 1800.0
        assert result.turns <= 1, [c for _, c in result.servers]


class FakeTrainer:
    """Answers with the rows it is given; None: away."""

    def __init__(self) -> None:
        self.answers: list[list[dict] | None] = []
        self.asked: list[int] = []
        self.step = 0

    async def get_status(self, after_step: int = 0, max_wait_s: float = 0.0) -> TrainerStatus:
        self.asked.append(after_step)
        rows = self.answers.pop(0)
        if rows is None:
            raise Unavailable("no trainer")
        self.step += len(rows)
        return TrainerStatus("training", self.step, 100, 1, 1, "", rows)


async def test_watch_when_the_trainer_tells_its_steps_then_waiting_is_left_out():
    trainer, seen, busy = FakeTrainer(), [], [0.0]
    watch = LoadWatch(
        trainer,
        servers=lambda: 2,
        generating_s=lambda: busy[0],
        report=lambda number, load, _: seen.append((number, load)),
    )
    row = {"time/step": 10.0, "time/wait": 4.0}
    trainer.answers = [[row], [row, row], None, [row]]  # the first was before this worker
    now = 0.0
    for _ in range(4):
        await watch.read_rows()
        watch.sample(now)
        now, busy[0] = now + 30.0, busy[0] + 30.0
    assert trainer.asked == [0, 1, 3, 3]
    assert seen[-1][1] == Load(2, 1.0, pytest.approx(0.6))
