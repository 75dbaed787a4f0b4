"""Kill the trainer anywhere, as often as you like: it trains on the same batches to the same end.

Real processes: Redis, buffer, weight-sync, an inference server, and trainers. CHAOS_SEED picks the
points of the kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from tests.chaos.replays import (
    assert_kept_once,
    assert_trained_once,
    check_batches,
    check_replays,
    prefilled,
    until_steps,
)
from tests.chaos.trainer_rig import BATCH, trainer_rig, whole_run
from tests.integration.stack_tools import RunningStack, eventually
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

from areal_torch.training.rank_watch import RANK_SILENT_S

pytestmark = pytest.mark.timeout(900)

SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS, STEPS = 20, 60


def test_trainer_when_killed_20_times_then_same_batches_and_same_weights_to_the_bit(
    tiny_model: Path, tmp_path: Path
) -> None:
    common = (*prefilled(tiny_model, STEPS), "noise=true", "pace_s=0.1")
    with trainer_rig(tmp_path, "whole", *common, generation=False) as whole:
        expected = whole.prefill(STEPS * BATCH)
        whole.finish()
        assert check_batches(whole, expected, STEPS) == 0
        reference = load_file(whole.run_dir / "final" / "model.safetensors")
    rng = random.Random(SEED)
    with trainer_rig(tmp_path, "killed", *common, generation=False) as killed:
        assert killed.prefill(STEPS * BATCH) == expected
        for number in range(KILLS):
            print(f"kill {number + 1}: {killed.kill_at_random(rng, STEPS)}")
        killed.finish()
        replayed = check_batches(killed, expected, STEPS)
        print(f"{replayed} steps replayed")
        assert replayed > 0
        assert_trained_once(killed, STEPS)
        assert_kept_once(killed, STEPS)
        weights = load_file(killed.run_dir / "final" / "model.safetensors")
    start = load_file(tiny_model / "model.safetensors")
    assert weights.keys() == reference.keys() == start.keys()
    for name, tensor in reference.items():
        assert weights[name].equal(tensor), f"{name} differs"
        assert not tensor.equal(start[name]), f"{name} was never trained"


def test_trainer_when_resumed_on_2_then_1_then_2_ranks_then_same_batches_and_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = 12
    common = (*prefilled(tiny_model, steps), "actor.dtype=float64", "pace_s=0.1")
    with trainer_rig(tmp_path, "two", *common, generation=False) as two:
        expected = two.prefill(steps * BATCH)
        two.finish(ranks=2)
        assert check_batches(two, expected, steps) == 0
        reference = load_file(two.run_dir / "final" / "model.safetensors")
    with trainer_rig(tmp_path, "changing", *common, generation=False) as changing:
        changing.prefill(steps * BATCH)
        for ranks, last in ((2, 5), (1, 8)):
            trainer = changing.trainer(ranks)
            until_steps(changing, trainer, last)
            trainer.kill()
        changing.finish(ranks=2)
        assert check_batches(changing, expected, steps) > 0
        assert_kept_once(changing, steps)
        lives = [(x["incarnation"], x["ranks"]) for x in changing.seen()]
        assert sorted(set(lives)) == [(1, 2), (2, 1), (3, 2)]
        weights = load_file(changing.run_dir / "final" / "model.safetensors")
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        assert str(tensor.dtype) == "torch.float64"
        error = float((weights[name] - tensor).norm() / tensor.norm())
        assert error <= 1e-10, f"{name} differs by {error:.1e} of its norm"


def test_first_gradients_when_taken_by_2_then_1_then_2_ranks_then_equal_in_float32(
    tiny_model: Path, tmp_path: Path
) -> None:
    common = (*prefilled(tiny_model, 3), "checkpoint.freq_steps=0", "pace_s=0.2")
    file = tmp_path / "gradients"
    with trainer_rig(tmp_path, "gradients", *common, generation=False) as rig:
        rig.prefill(3 * BATCH)
        for incarnation, ranks in enumerate((2, 1, 2), start=1):
            trainer = rig.trainer(ranks, gradients=str(file))
            eventually(
                lambda life=incarnation: any(
                    x["step"] == 2 and x["incarnation"] == life for x in rig.seen()
                ),
                f"step 2 of life {incarnation}",
                90.0,
                lambda: rig.trainer_log,
            )
            trainer.kill()
    first, *others = (load_file(f"{file}-{life}.safetensors") for life in (1, 2, 3))
    for other in others:
        assert_gradients_close(other, first, 1e-5)


def test_two_ranks_when_a_batch_is_long_in_coming_then_they_wait_for_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Longer than a rank may be silent: waiting is not silence."""
    with trainer_rig(tmp_path, "late", *prefilled(tiny_model, 2), generation=False) as rig:
        trainer = rig.trainer(ranks=2)
        eventually(lambda: "registered" in rig.trainer_log, "its registration", 60.0)
        time.sleep(RANK_SILENT_S + 8)
        assert trainer.popen.poll() is None, rig.trainer_log[-3000:]
        rig.prefill(2 * BATCH)
        assert trainer.popen.wait(60.0) == 0, rig.trainer_log[-3000:]
        assert {x["incarnation"] for x in rig.seen()} == {1}


def test_trainer_when_down_then_generation_fills_the_budget_and_waits_and_nothing_else_restarts(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps, eta = 12, 2
    common = (
        f"model.path={tiny_model}",
        f"total_train_steps={steps}",
        f"rollout.max_head_offpolicyness={eta}",
        "checkpoint.freq_steps=3",
        "pace_s=0.3",
    )
    with trainer_rig(tmp_path, "down", *common, generation=True) as rig:
        trainer = rig.trainer()
        until_steps(rig, trainer, 5)
        trainer.kill()
        at_death = rig.counts()
        before = {name: p["pid"] for name, p in rig.stack.content["processes"].items()}

        def budget_is_full() -> bool:
            counts, ahead = rig.counts(), rig.batches_ahead()
            # A batch that was taken counts until the version that it makes is served: that one may
            # have died with the trainer, and nothing waits for it.
            assert 0 <= ahead <= 2
            return counts["running"] == 0 and counts["completed"] == (eta + 1 - ahead) * BATCH

        eventually(budget_is_full, "a full budget", 60.0, lambda: f"{at_death} -> {rig.counts()}")
        full = rig.counts()
        assert full["completed"] >= at_death["completed"]
        assert full["queued"] > 0, "it is the budget that stops generation, not a lack of tasks"
        for _ in range(10):
            time.sleep(1.0)
            assert rig.counts() == full
        rig.finish()
        after = {name: p["pid"] for name, p in rig.stack.content["processes"].items()}
        assert after == before, "nothing else was restarted"
        assert check_replays(rig, steps) > 0
        assert rig.counts()["trained"] == steps * BATCH
        assert max(row["staleness/max"] for row in rig.rows()) <= eta


def ranks_of(stack: RunningStack) -> dict[int, psutil.Process]:
    """The trainer's ranks, by number; empty while it starts."""
    try:
        children = psutil.Process(stack.process("trainer")["pid"]).children(recursive=True)
        return {int(c.environ()["RANK"]): c for c in children if "RANK" in c.environ()}
    except (psutil.Error, KeyError, ValueError):
        return {}


def test_run_when_a_rank_is_killed_or_stopped_then_named_within_60_s_and_every_replay_is_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A whole `areal run`: live generation, two ranks, and the launcher that starts them again."""
    steps = 30
    overrides = (
        "stack.max_restarts=20",
        "allocation_mode=sglang:d1+fsdp:d2",
        f"total_train_steps={steps}",
    )
    with whole_run(tmp_path, "ranks", tiny_model, *overrides) as (rig, launcher):
        stack = rig.stack
        # (what, which rank, what the launcher must say)
        blows = (
            (signal.SIGKILL, 1, "rank 1 (pid {pid} on"),
            (signal.SIGSTOP, 1, "rank 1 (pid {pid} on"),
            (signal.SIGKILL, 0, "rank 0 (pid {pid} on"),
            (signal.SIGSTOP, 0, "rank 0 (pid {pid} on"),
        )
        for number, (signum, rank, cause) in enumerate(blows):
            seen = len(rig.seen())
            eventually(
                lambda seen=seen: len(rig.seen()) >= seen + 6 or launcher.poll() is not None,
                "three more steps",
                120.0,
                lambda: stack.log("trainer"),
            )
            assert launcher.poll() is None, (tmp_path / "run.log").read_text()
            torchrun, victim = stack.process("trainer")["pid"], ranks_of(stack)[rank]
            began = time.monotonic()
            victim.send_signal(signum)
            eventually(
                lambda n=number: stack.process("trainer")["restarts"] == n + 1,
                "the end of the job",
                60.0,
                lambda: stack.log("trainer"),
            )
            took = time.monotonic() - began
            assert not psutil.pid_exists(torchrun)
            assert not psutil.pid_exists(victim.pid)
            said = [x for x in stack.log("launcher").splitlines() if "; restart " in x]
            print(f"{signum.name} rank {rank}: ended after {took:.1f} s: {said[-1]}")
            assert cause.format(pid=victim.pid) in said[-1]
        assert launcher.wait(180.0) == 0, (tmp_path / "run.log").read_text()
        stack.assert_gone()
    assert check_replays(rig, steps) > 0
    assert_kept_once(rig, steps)
    summary = json.loads((rig.run_dir / "summary.json").read_text())
    assert summary["restarts"] == {"trainer": len(blows)}
    assert summary["accounting"]["trained"] == steps * BATCH
