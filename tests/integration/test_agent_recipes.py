"""The examples' agents are trained through a whole stack, in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.metric_names import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "example",
    [
        "openai_agent",
        "anthropic_agent",
        pytest.param(
            "openai_agents_sdk",
            marks=pytest.mark.skipif(
                find_spec("agents") is None, reason="needs openai-agents: make test-agents-sdk"
            ),
        ),
    ],
)
def test_agent_when_run_then_it_trains(tmp_path: Path, example: str) -> None:
    steps = ("total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=3")
    small = ("train_problems=200", "heldout_problems=6", "warm_start_steps=2")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run"),
            *(str(ROOT / "examples" / f"{example}.py"), *steps, *small),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "services"), *sys.path])},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    [run] = (tmp_path / "runs" / example.replace("_", "-")).iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    rows = read_metrics(run)
    # A warm start of two steps gets every sum wrong: both answers of a run are trained on.
    assert all(row["staleness/max"] <= 2 for row in rows), rows
    assert len(rows) == 2
