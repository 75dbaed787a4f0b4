"""`make elastic`: the arithmetic run while its inference servers go 2 -> 4 -> 1 -> 3, and one dies.

ELASTIC_SEED=1 ELASTIC_STEPS=150 ELASTIC_BASELINE=0 make elastic

When each happens, and who is killed with -9, is the seed's. First the same steps with two servers
throughout, for the time to compare with.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.chaos.books import Check
from tests.chaos.elastic_run import KILL, Plan, train

SEED = int(os.environ.get("ELASTIC_SEED", "0"))
STEPS = int(os.environ.get("ELASTIC_STEPS", "120"))
BASELINE = os.environ.get("ELASTIC_BASELINE", "1") == "1"
SCALES = (4, 1, 3)

pytestmark = [pytest.mark.timeout(3600)]


def plan_of(seed: int) -> Plan:
    rng = random.Random(seed)
    moments = sorted(rng.sample(range(STEPS // 10, STEPS * 8 // 10), 4))
    actions: list[int | str] = [*SCALES]
    actions.insert(rng.randrange(len(SCALES) + 1), KILL)
    return Plan(f"seed-{seed}", STEPS, tuple(zip(moments, actions, strict=True)), seed)


def test_training_when_servers_come_go_and_die_then_nothing_is_lost(tmp_path: Path) -> None:
    baseline = train(Plan(f"base-{SEED}", STEPS), tmp_path / "base") if BASELINE else None
    run = train(plan_of(SEED), tmp_path / "elastic")
    print(f"\nseed {SEED}, {STEPS} steps:")
    run.report()
    if baseline is not None:
        # Where more servers do not help (they share this machine's cores), neither do fewer harm
        # by more than what they take less; and starting one takes from the cores that train.
        capacity = baseline.wall_s * max(1.0, baseline.servers / run.servers)
        starting = run.starting_cpu_s / (os.cpu_count() or 1)
        explained = capacity + starting
        print(
            f"  with {baseline.servers:.2f} servers throughout: {baseline.wall_s:.1f} s; average "
            f"capacity explains {capacity:.1f} s, starting servers ({run.starting_cpu_s:.1f} s of "
            f"CPU) {starting:.1f} s; ratio {run.wall_s / explained:.2f}"
        )
        run.checks.append(
            Check("time", run.wall_s < 2.0 * explained, f"{run.wall_s:.1f} of {explained:.1f} s")
        )
    assert not run.broken(), run.broken()
