"""A mixture of experts is trained with replayed routes while its processes are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.chaos.books import check_books, read_ledger, read_lines
from tests.integration.stack_tools import RunningStack, areal_background, eventually

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, SAMPLES, PROBLEMS, ETA = 8, 8, 4, 200, 0
VICTIMS = ["inference-0", "rollout-0", "trainer"]
LEARNS = "the reward rises"
"""What a run of so few steps need not show."""

pytestmark = [pytest.mark.timeout(1200)]


def arguments() -> list[str]:
    return [
        str(ROOT / "examples" / "arithmetic_models.py"),
        "architecture=qwen3_moe",
        "experiment_name=routes",
        "trial_name=killed",
        "allocation_mode=sglang:d2+fsdp:d1",
        "warm_start_steps=1",
        f"total_train_steps={STEPS}",
        f"train_dataset.batch_size={BATCH}",
        f"gconfig.n_samples={SAMPLES}",
        f"train_problems={PROBLEMS}",
        "heldout_problems=10",
        f"rollout.max_head_offpolicyness={ETA}",
        "rollout.lease_ttl_s=10",
        "checkpoint.freq_steps=2",
        "stack.max_restarts=20",
    ]


def test_replay_when_server_worker_and_trainer_are_killed_then_books_are_exact_and_it_goes_on(
    tmp_path: Path,
) -> None:
    stack = RunningStack(tmp_path / "runs" / "routes" / "killed")

    def steps() -> int:
        return len(read_lines(stack.run_dir / "metrics.jsonl"))

    def kill_after(done: int, name: str) -> None:
        eventually(lambda: steps() >= done, f"step {done}", 300.0)
        pid = stack.process(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: stack.process(name)["pid"] not in (0, None, pid), f"another {name}", 120.0
        )

    launcher = areal_background("run", *arguments(), cwd=tmp_path, log=tmp_path / "out.log")
    try:
        eventually(lambda: stack.content, "stack.json is there", 120.0)
        stack.wait_ready(300.0)
        for number, name in enumerate(VICTIMS, 1):  # the trainer resumes from an earlier step
            kill_after(2 * number - 1, name)
        assert launcher.wait(600.0) == 0, (tmp_path / "out.log").read_text()[-4000:]
        stack.assert_gone()
    finally:
        if launcher.poll() is None:
            psutil.Process(launcher.pid).kill()
            launcher.wait(10.0)
        stack.clean_up()
    ledger = read_ledger(stack.run_dir, "routes/killed", tmp_path)
    books = check_books(ledger, stack.run_dir, steps=STEPS, batch=BATCH, problems=PROBLEMS, eta=ETA)
    broken = [f"{c.name}: {c.detail}" for c in books if not c.holds and c.name != LEARNS]
    assert not broken, "; ".join(broken)
    rows = read_lines(stack.run_dir / "metrics.jsonl")
    # An answer that another server continues, or another worker, still has a route for each token.
    assert [row["routes/missing"] for row in rows] == [0] * STEPS
    assert all(row["routes/replayed"] > 0.9 for row in rows)
    # And it is the choice with which it was sampled, also after the trainer resumed.
    assert all(row["mismatch/max"] <= 1e-4 for row in rows)
    for name in ("rollout-0", "trainer"):
        assert "routes_missing" not in stack.log(name)
        assert "routes_not_replayed" not in stack.log(name)
