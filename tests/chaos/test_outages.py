"""Redis or NATS is away for a minute in the middle of a training run: it waits or does without.

The stores are the test's own, so that no supervisor restarts them. OUTAGE_S makes it shorter.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.stack_tools import RunningStack, areal_background, eventually
from tests.nats_server import NatsServer
from tests.redis_server import RedisServer

from areal_torch.models.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
OUTAGE_S = float(os.environ.get("OUTAGE_S", "60"))
BATCH, SAMPLES, STEPS = 8, 4, 12


@pytest.mark.parametrize("outage", ["redis-killed", "redis-stopped", "nats-killed"])
def test_run_when_a_store_is_away_for_a_minute_then_it_waits_and_finishes_by_itself(
    tmp_path: Path, outage: str
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    redis, nats = RedisServer(tmp_path / "redis", appendfsync="always"), NatsServer(tmp_path / "n")
    redis.start()
    nats.start()
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / outage)
    log = tmp_path / "out.jsonl"
    launcher = areal_background(
        *("run", "--json", str(ROOT / "examples" / "arithmetic_grpo.py")),
        f"endpoints.redis={redis.url}",
        f"endpoints.nats={nats.url}",
        f"trial_name={outage}",
        f"total_train_steps={STEPS}",
        f"train_dataset.batch_size={BATCH}",
        f"gconfig.n_samples={SAMPLES}",
        "allocation_mode=sglang:d2+fsdp:d1",
        *("heldout_problems=10", "train_problems=400", f"model.path={model}"),
        "rollout.max_concurrent_rollouts=32",
        cwd=tmp_path,
        log=log,
    )
    try:
        eventually(lambda: len(rows_of(stack)) >= 2, "two steps", 200.0)
        if outage == "redis-stopped":
            redis.send_signal(signal.SIGSTOP)
        else:
            (redis if outage == "redis-killed" else nats).kill()
        time.sleep(OUTAGE_S)
        # Without announcements the run continues, perhaps to its end; without the ledger it waits.
        over = launcher.poll()
        assert over is None or (over == 0 and outage == "nats-killed"), log.read_text()[-3000:]
        during = len(rows_of(stack))
        if outage == "redis-stopped":
            redis.send_signal(signal.SIGCONT)
        elif outage == "redis-killed":
            redis.start()
        else:
            nats.start()
        back = time.monotonic()
        if outage == "nats-killed":
            assert during >= 3, "announcements are not needed"
        else:
            assert during < STEPS, "the ledger is away: no new batches"
            eventually(lambda: len(rows_of(stack)) > during, "the next step", 60.0)
            print(f"{outage}: next step {time.monotonic() - back:.1f} s after the end")
        assert launcher.wait(240.0) == 0, log.read_text()[-3000:]
    finally:
        launcher.kill()
        launcher.wait(20)
        stack.clean_up()
        redis.kill()
        nats.kill()
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["restarts"] == {}, "it recovered by waiting, not by dying"
    accounts: dict[str, int] = dict(summary["accounting"])
    assert accounts.pop("submitted") == sum(accounts.values())
    assert accounts["trained"] == STEPS * BATCH
    assert accounts["dead_lettered"] == 0
    assert [row["step"] for row in rows_of(stack)] == list(range(1, STEPS + 1))


def rows_of(stack: RunningStack) -> list[dict[str, Any]]:
    file = stack.run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
