"""The example's recipe has no rows: agents beside it are what it trains on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.stack_tools import RunningStack, areal_background, environment, eventually
from tests.metric_names import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(500)
def test_outside_agents_when_they_play_beside_the_run_then_it_trains(tmp_path: Path) -> None:
    recipe = str(ROOT / "examples" / "outside_agents.py")
    small = ("total_train_steps=2", "train_dataset.batch_size=2", "trial_name=t")
    run = areal_background("run", recipe, *small, cwd=tmp_path, log=tmp_path / "run.log")
    stack = RunningStack(tmp_path / "runs" / "outside-agents" / "t")
    agents = None
    try:
        eventually(
            lambda: stack.state() == "ready", "the stack", 200, (tmp_path / "run.log").read_text
        )
        url = f"http://{stack.address('gateway')}"
        agents = subprocess.Popen(
            [sys.executable, recipe, url, stack.security.token], cwd=tmp_path, env=environment()
        )
        code = run.wait(280)
        assert code == 0, (tmp_path / "run.log").read_text()[-3000:]
        assert agents.poll() is None
    finally:
        for process in (agents, run):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    rows = read_metrics(stack.run_dir)
    assert all(0 <= row["reward/mean"] < 1 for row in rows)
    assert len(rows) == 2
