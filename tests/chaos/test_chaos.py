"""`make chaos`: a real training, every process of which is killed or stopped at random.

CHAOS_SEED=1 CHAOS_MINUTES=30 CHAOS_RANKS=2 make chaos ARGS=--json
CHAOS_TABLE=docs/failure-modes.md make chaos: also writes what it measured there
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.chaos.books import Check, check_books, read_ledger
from tests.chaos.faults import Victims
from tests.chaos.harness import RECOVERY_S, Chaos
from tests.chaos.report import as_dict, show, write_table
from tests.integration.stack_tools import RunningStack, areal_background, eventually

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("CHAOS_SEED", "0"))
MINUTES = float(os.environ.get("CHAOS_MINUTES", "3"))
AT_ONCE = int(os.environ.get("CHAOS_AT_ONCE", "3"))
RANKS = int(os.environ.get("CHAOS_RANKS", "1"))
STEPS = int(os.environ.get("CHAOS_STEPS", str(round(50 * MINUTES))))
TABLE = os.environ.get("CHAOS_TABLE", "")
BATCH, PROBLEMS, ETA = 32, 1000, 2

pytestmark = [pytest.mark.timeout(60 * MINUTES * 3 + 600)]


ALLOCATIONS = {
    "apart": f"sglang:d2+fsdp:d{RANKS}",
    # Servers sleep for half of the time, so that is when half of the faults come.
    "alternating": f"sglang:d{RANKS}|fsdp:d{RANKS}@alternating",
}


def arguments(token: Path, trial: str, mode: str) -> list[str]:
    return [
        str(ROOT / "examples" / "arithmetic_grpo.py"),
        f"security.dir={token.parent}",
        "experiment_name=chaos",
        f"trial_name={trial}",
        "model.path=runs/models/chaos",  # made by the first run, with these problems
        f"allocation_mode={ALLOCATIONS[mode]}",
        f"total_train_steps={STEPS}",
        f"train_dataset.batch_size={BATCH}",
        f"train_problems={PROBLEMS}",
        "heldout_problems=50",
        f"rollout.max_head_offpolicyness={ETA}",
        "rollout.max_concurrent_rollouts=128",
        "rollout.dynamic_sampling=true",
        "rollout.lease_ttl_s=10",
        "reward.workers=2",
        "checkpoint.freq_steps=5",
        "stack.max_restarts=1000",
    ]


async def break_things(stack: RunningStack) -> Chaos:
    victims = Victims(stack)
    chaos = Chaos(victims, SEED, AT_ONCE)
    try:
        await chaos.run(60.0 * MINUTES)
    finally:
        await victims.close()
    return chaos


@pytest.mark.parametrize("mode", ALLOCATIONS)
def test_training_when_processes_are_killed_and_stopped_then_it_finishes_and_the_books_balance(
    tmp_path: Path, request: pytest.FixtureRequest, mode: str
) -> None:
    trial = f"seed-{SEED}" if mode == "apart" else f"seed-{SEED}-{mode}"
    stack = RunningStack(ROOT / "runs" / "chaos" / trial)
    shutil.rmtree(stack.run_dir, ignore_errors=True)
    stack.run_dir.mkdir(parents=True)
    token = tmp_path / "token"
    token.write_text(secrets.token_urlsafe(32))
    token.chmod(0o600)
    began = time.monotonic()
    launcher = areal_background(
        "run",
        "--json",
        *arguments(token, trial, mode),
        cwd=ROOT,
        log=stack.run_dir / "out.jsonl",
    )
    try:
        eventually(lambda: stack.content, "stack.json is there", 60.0)
        stack.wait_ready(300.0)
        eventually(lambda: stack.process("trainer")["state"] == "up", "the trainer is up", 60.0)
        chaos = asyncio.run(break_things(stack))
        code = launcher.wait(60.0 * MINUTES + 300.0)
        left = [f"{p.pid} {p.name()}" for p in stack.processes()]
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(10.0)
        stack.clean_up()
    late = [f"{f.victim} ({f.action}) at {f.at_s} s" for f in chaos.faults if f.late]
    checks = [
        Check("exit code 0", code == 0, str(code)),
        Check("no process is left behind", not left, ", ".join(left)),
        Check(f"each recovered within {RECOVERY_S:.0f} s", not late, ", ".join(late)),
    ]
    ledger = read_ledger(stack.run_dir, f"chaos/{trial}", tmp_path)
    checks += check_books(
        ledger, stack.run_dir, steps=STEPS, batch=BATCH, problems=PROBLEMS, eta=ETA
    )
    report = as_dict(SEED, MINUTES, time.monotonic() - began, chaos.faults, checks)
    file = stack.run_dir / "chaos.json"
    file.write_text(json.dumps(report, indent=2) + "\n")
    if request.config.getoption("--json", default=False):
        print(json.dumps(report))
    else:
        show(report, Console(width=120))
        print(f"in full: {file}")
    if TABLE and mode == "apart" and all(check.holds for check in checks):
        cores = len(os.sched_getaffinity(0))
        write_table(ROOT / TABLE, chaos.faults, seed=SEED, ranks=RANKS, cores=cores)
    broken = [f"{check.name}: {check.detail}" for check in checks if not check.holds]
    assert not broken, "; ".join(broken)
