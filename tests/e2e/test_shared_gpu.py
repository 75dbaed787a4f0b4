"""Servers and trainer on the same devices, at once and in turns: the whole stack on CPUs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.stack_tools import RunningStack, areal_background, eventually
from tests.kept import check_kept
from tests.metric_names import read_metrics

pytestmark = pytest.mark.timeout(420)

RECIPE = Path(__file__).parent / "recipes" / "even_ids.py"
BATCH, SAMPLES = 8, 8
RELEASED = ["kv_cache", "weights"]


def arguments(tmp_path: Path, allocation: str, steps: int, *more: str) -> list[str]:
    return [
        str(RECIPE),
        "experiment_name=even",
        "trial_name=trial0",
        f"model.path={tmp_path / 'model'}",
        "model.context_length=64",
        f"allocation_mode={allocation}",
        f"total_train_steps={steps}",
        f"train_dataset.batch_size={BATCH}",
        f"gconfig.n_samples={SAMPLES}",
        "gconfig.max_new_tokens=8",
        "actor.optimizer={lr: 1.0e-2, weight_decay: 0.0}",
        "rollout.max_concurrent_rollouts=32",
        "checkpoint.freq_steps=1",
        *more,
    ]


def check_run(stack: RunningStack, steps: int) -> dict[str, Any]:
    """It finished, it learned, and every task is accounted for."""
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    rows = read_metrics(stack.run_dir)
    assert summary["status"] == "finished"
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    books = dict(summary["accounting"])
    assert books.pop("submitted") == sum(books.values())
    assert books["trained"] == steps * BATCH
    assert books["dead_lettered"] == books["rejected"] == books["expired"] == 0
    for live in ("queued", "running", "completed", "batched"):
        assert books[live] == 0, books
    assert summary["staleness"]["max"] <= 2
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    check_kept(stack.run_dir, steps)
    return summary


def released(stack: RunningStack, name: str = "inference-0") -> list[str] | None:
    """What a server's memory lacks; None: it does not answer."""
    try:
        headers = stack.security.headers()
        answer = httpx.get(f"http://{stack.address(name)}/server_info", headers=headers, timeout=5)
        [state] = answer.json()["internal_states"]
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    return list(state["released"])


@pytest.mark.long
@pytest.mark.parametrize(
    "allocation", ["sglang:d1|fsdp:d1@shared", "sglang:d2|fsdp:d2@alternating"]
)
def test_run_when_servers_and_trainer_share_devices_then_it_learns_and_the_books_balance(
    tmp_path: Path, allocation: str
) -> None:
    steps, log = 8, tmp_path / "out.log"
    stack = RunningStack(tmp_path / "runs" / "even" / "trial0")
    launcher = areal_background(
        "run", *arguments(tmp_path, allocation, steps), cwd=tmp_path, log=log
    )
    try:
        assert launcher.wait(300.0) == 0, log.read_text() + stack.log("trainer")
        stack.assert_gone()
    finally:
        launcher.kill()
        stack.clean_up()
    summary = check_run(stack, steps)
    assert "restarts" not in summary or not summary["restarts"]
    turns = [line for line in stack.log("trainer").splitlines() if '"gpu_turn"' in line]
    alternating = allocation.endswith("alternating")
    # One for the model, one for each step, and one to go on after the evaluation; both ways.
    assert len(turns) == (2 * (1 + steps + 1) - 1 if alternating else 0)
    assert bool([line for line in stack.log("weight-sync").splitlines() if '"asleep"' in line]) == (
        alternating
    )


@pytest.mark.long
def test_run_when_processes_are_killed_while_servers_sleep_then_it_learns_and_the_books_balance(
    tmp_path: Path,
) -> None:
    """In steps 2, 4, 5 the server, weight-sync and the trainer die, in the trainer's turn."""
    steps, gate, log = 8, tmp_path / "gate", tmp_path / "out.log"
    gate.mkdir()
    stack = RunningStack(tmp_path / "runs" / "even" / "trial0")
    command = arguments(
        tmp_path,
        "sglang:d1|fsdp:d1@alternating",
        steps,
        f"gate={gate}",
        "gate_steps=[2,4,5]",
        "rollout.lease_ttl_s=10",
    )
    launcher = areal_background("run", *command, cwd=tmp_path, log=log)

    def until(condition: Any, what: str) -> None:
        def so() -> bool:
            assert launcher.poll() is None, log.read_text()[-4000:] + stack.log("trainer")[-4000:]
            return bool(condition())

        eventually(so, what, 140.0, lambda: stack.log("weight-sync") + stack.log("trainer"))

    def killed(name: str) -> int:
        pid = int(stack.process(name)["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def asleep() -> bool:
        return released(stack) == RELEASED

    try:
        until((gate / "at-2").exists, "step 2")
        assert asleep()
        pid = killed("inference-0")
        until(lambda: stack.process("inference-0")["pid"] not in (0, pid, None), "another server")
        until(asleep, "the new server sleeps while the trainer has its turn")
        (gate / "go-2").touch()

        until((gate / "at-4").exists, "step 4")
        assert asleep()
        pid = killed("weight-sync")
        until(lambda: stack.process("weight-sync")["pid"] not in (0, pid, None), "another one")
        until(lambda: stack.log("weight-sync").count('"server_registered"') >= 1, "its servers")
        asleep_until = time.monotonic() + 16.0  # a lease, after which only renewals keep it asleep
        until(lambda: time.monotonic() > asleep_until or not asleep(), "a lease to pass")
        assert asleep(), "the trainer renews its turn at the next weight-sync"
        (gate / "go-4").touch()

        until((gate / "at-5").exists, "step 5")
        assert asleep()
        (gate / "at-5").unlink()
        killed("trainer")
        until(lambda: released(stack) == [], "the server to wake")
        until((gate / "at-5").exists, "step 5, again")
        assert asleep()
        (gate / "go-5").touch()
        assert launcher.wait(200.0) == 0, log.read_text() + stack.log("trainer")
        stack.assert_gone()
    finally:
        launcher.kill()
        stack.clean_up()
    summary = check_run(stack, steps)
    assert summary["restarts"] == {"inference-0": 1, "trainer": 1, "weight-sync": 1}
