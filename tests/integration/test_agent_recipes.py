"""The examples' agents are trained through a whole stack, in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_agent_when_run_then_it_trains(tmp_path: Path, sdk: str) -> None:
    steps = ("total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=3")
    small = ("train_problems=200", "heldout_problems=6", "warm_start_steps=2")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run"),
            *(str(ROOT / "examples" / f"{sdk}_agent.py"), *steps, *small),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT / "services")},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    [run] = (tmp_path / "runs" / f"{sdk}-agent").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # A warm start of two steps gets every sum wrong: both answers of a run are trained on.
    assert all(row["staleness/max"] <= 2 for row in rows), rows
    assert len(rows) == 2
