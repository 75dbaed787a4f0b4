"""`make elastic`: the arithmetic run while its inference servers go 2 -> 4 -> 1 -> 3, and one dies.

ELASTIC_SEED=1 ELASTIC_STEPS=150 ELASTIC_BASELINE=0 make elastic

When each happens, and who is killed with -9, is the seed's. First the same steps with two servers
throughout, for the time to compare with.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.chaos.books import Check, check_books, read_ledger, read_lines
from tests.integration.stack_tools import RunningStack, areal, areal_background, eventually

from areal.clients.weight_sync import WeightSyncClient
from areal.errors import ArealError
from areal.launchers.tags import find_tagged
from areal.servers import ServerState

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("ELASTIC_SEED", "0"))
STEPS = int(os.environ.get("ELASTIC_STEPS", "120"))
BASELINE = os.environ.get("ELASTIC_BASELINE", "1") == "1"
BATCH, PROBLEMS, ETA = 32, 1000, 2
SCALES = (4, 1, 3)

pytestmark = [pytest.mark.timeout(3600)]


@dataclass
class Run:
    """One training, and what was seen of it."""

    stack: RunningStack
    wall_s: float = 0.0
    """From the first step's end to the last's."""
    servers: float = 0.0
    """Serving, averaged over that time."""
    happened: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def arguments(trial: str) -> list[str]:
    return [
        str(ROOT / "examples" / "arithmetic_grpo.py"),
        "experiment_name=elastic",
        f"trial_name={trial}",
        "model.path=runs/models/elastic",
        "allocation_mode=sglang:d2+fsdp:d1",
        f"total_train_steps={STEPS}",
        f"train_dataset.batch_size={BATCH}",
        f"train_problems={PROBLEMS}",
        "heldout_problems=50",
        f"rollout.max_head_offpolicyness={ETA}",
        "rollout.max_concurrent_rollouts=128",
        "checkpoint.freq_steps=20",
        "stack.ready_timeout_s=300",
    ]


def steps_of(stack: RunningStack) -> int:
    file = stack.run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


class Elastic:
    """Scales and kills when the seed says so."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._random = random.Random(SEED)
        moments = sorted(self._random.sample(range(STEPS // 10, STEPS * 8 // 10), 4))
        actions: list[int | str] = [*SCALES]
        actions.insert(self._random.randrange(len(SCALES) + 1), "kill")
        self._plan = list(zip(moments, actions, strict=True))

    async def act(self, ended: asyncio.Event) -> None:
        for step, action in self._plan:
            # A file cannot tell that it has grown.
            while steps_of(self._run.stack) < step and not ended.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            at = steps_of(self._run.stack)
            if ended.is_set():
                self._run.checks.append(Check(f"{action} before the end", False, f"step {at}"))
                return
            if action == "kill":
                self._kill(at)
                continue
            began = time.monotonic()
            done = await asyncio.to_thread(
                areal, "scale", f"inference={action}", "--run", str(self._run.stack.run_dir),
                cwd=ROOT, timeout=400.0,
            )  # fmt: skip
            said = (done.stdout + done.stderr).strip().splitlines()[-1:]
            self._run.happened.append(
                f"step {at}: scale to {action}, {time.monotonic() - began:.1f} s: {said}"
            )
            self._run.checks.append(Check(f"scale to {action}", done.returncode == 0, str(said)))

    def _kill(self, at: int) -> None:
        processes = self._run.stack.content["processes"]
        up = [n for n, p in processes.items() if n.startswith("inference") and p["state"] == "up"]
        name = self._random.choice(sorted(up))
        os.kill(processes[name]["pid"], signal.SIGKILL)
        self._run.happened.append(f"step {at}: kill -9 {name}")


async def count_servers(stack: RunningStack, ended: asyncio.Event) -> float:
    """Serving servers, averaged over the time of training."""
    client = WeightSyncClient(stack.address("weight-sync"))
    seen: list[int] = []
    try:
        while not ended.is_set():
            if steps_of(stack):
                try:
                    servers, _ = await client.list_servers(timeout=5.0)
                    seen.append(sum(s.state is ServerState.SERVING for s in servers))
                except ArealError:
                    pass  # at the very end
            await asyncio.sleep(0.2)
    finally:
        await client.close()
    return sum(seen) / max(1, len(seen))


def train(trial: str, scratch: Path, *, elastic: bool) -> Run:
    stack = RunningStack(ROOT / "runs" / "elastic" / trial)
    shutil.rmtree(stack.run_dir, ignore_errors=True)
    stack.run_dir.mkdir(parents=True)
    run = Run(stack)
    launcher = areal_background(
        "run", "--json", *arguments(trial), cwd=ROOT, log=stack.run_dir / "out.jsonl"
    )

    async def watch() -> None:
        ended = asyncio.Event()
        counting = asyncio.create_task(count_servers(stack, ended))
        acting = asyncio.create_task(Elastic(run).act(ended)) if elastic else None
        await asyncio.to_thread(launcher.wait)
        ended.set()
        run.servers = await counting
        if acting is not None:
            await acting

    try:
        eventually(lambda: stack.content, "stack.json is there", 60.0)
        stack.wait_ready(400.0)
        asyncio.run(watch())
        left = [f"{p.pid} {p.name()}" for p in find_tagged(stack.content["stack_id"])]
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(10.0)
        stack.clean_up()
    rows = read_lines(stack.run_dir / "metrics.jsonl")
    run.wall_s = rows[-1]["time"] - rows[0]["time"]
    run.checks.append(Check("exit code 0", launcher.returncode == 0, str(launcher.returncode)))
    run.checks.append(Check("no process is left behind", not left, ", ".join(left)))
    ledger = read_ledger(stack.run_dir, f"elastic/{trial}", scratch)
    run.checks += check_books(
        ledger, stack.run_dir, steps=STEPS, batch=BATCH, problems=PROBLEMS, eta=ETA
    )
    dead = ledger.counts.get("all:dead_lettered", 0)
    run.checks.append(Check("no task is dead-lettered", dead == 0, str(dead)))
    # Scored again by the weights of the version that its tokens name: the same probabilities.
    fresh = [r for r in rows if r["staleness_max"] == 0]
    off = max((abs(r["behavior_weight"] - 1.0) for r in fresh), default=0.0)
    run.checks.append(
        Check("fresh tokens carry their version", off < 0.01, f"{off:.4f} in {len(fresh)} steps")
    )
    drift = max(abs(r["behavior_weight"] - 1.0) for r in rows)
    run.checks.append(Check("no weight betrays a wrong version", drift < 0.1, f"{drift:.3f}"))
    return run


def test_training_when_servers_come_go_and_die_then_nothing_is_lost(tmp_path: Path) -> None:
    baseline = train(f"base-{SEED}", tmp_path / "base", elastic=False) if BASELINE else None
    run = train(f"seed-{SEED}", tmp_path / "elastic", elastic=True)
    print(f"\nseed {SEED}, {STEPS} steps:")
    for line in run.happened:
        print(f"  {line}")
    for check in run.checks:
        print(f"  {'ok  ' if check.holds else 'FAIL'} {check.name}: {check.detail}")
    print(f"  {run.wall_s:.1f} s of training, {run.servers:.2f} servers on average")
    if baseline is not None:
        # Where more servers do not help (they share this machine's cores), neither do fewer hurt
        # by more than what they take less.
        explained = baseline.wall_s * max(1.0, baseline.servers / run.servers)
        print(
            f"  with {baseline.servers:.2f} servers throughout: {baseline.wall_s:.1f} s; average "
            f"capacity explains {explained:.1f} s; ratio {run.wall_s / explained:.2f}"
        )
        run.checks.append(
            Check("time", run.wall_s < 2.0 * explained, f"{run.wall_s:.1f} of {explained:.1f} s")
        )
    broken = [f"{check.name}: {check.detail}" for check in run.checks if not check.holds]
    assert not broken, "; ".join(broken)
