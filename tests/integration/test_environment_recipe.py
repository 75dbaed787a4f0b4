"""Recipes with an environment are checked and trained through a whole stack, in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.metric_names import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_guess_number_when_run_then_each_guess_is_an_answer_of_one_trajectory(
    tmp_path: Path,
) -> None:
    small = ("total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4")
    small += ("heldout_games=20", "warm_start_steps=40")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run"),
            *(str(ROOT / "examples" / "guess_number.py"), *small),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT / "services")},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    [run] = (tmp_path / "runs" / "guess-number").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    # The model knows to say digits: some games are won, most take more than one guess.
    assert 0 < summary["heldout_before"] < 1
    rows = read_metrics(run)
    assert [row["samples"] for row in rows] == [16, 16]
    assert all(row["rollout/length_mean"] > 2 for row in rows), "a digit and an end are one guess"
