"""Training that diverges: the run ends once, says why, keeps the batch, publishes nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.cluster_runs import rows_of
from tests.integration.stack_tools import RunningStack, areal, environment

from areal_torch.engines.failed_step import load_failed_batch

pytestmark = pytest.mark.timeout(300)

RECIPE = Path(__file__).parent / "recipes" / "nan_advantages.py"
BATCH = 4


@pytest.mark.long
def test_run_when_gradients_stay_not_finite_then_it_ends_with_the_cause_and_the_batch(
    tiny_model: Path, tmp_path: Path
) -> None:
    stack = RunningStack(tmp_path / "runs" / "experiment" / "nan")
    try:
        done = areal(
            *("run", str(RECIPE), f"model.path={tiny_model}", "model.context_length=64"),
            *("allocation_mode=sglang:d1+fsdp:d2", "trial_name=nan", "total_train_steps=6"),
            *(f"train_dataset.batch_size={BATCH}", "gconfig.n_samples=2"),
            "gconfig.max_new_tokens=6",
            "rollout.max_head_offpolicyness=1",
            cwd=tmp_path,
            timeout=240.0,
        )
        stack.assert_gone()
    finally:
        stack.clean_up()
    folder = stack.run_dir / "failed_step_4"
    log = stack.log("trainer")
    assert done.returncode == 1, done.stdout + done.stderr + log
    said = next(line for line in log.splitlines() if line.startswith("areal-trainer: step 4: "))
    assert (
        "step 4: 2 optimizer steps in a row had a gradient that is not finite: rank 1: advantages "
        "are not finite ("
    ) in said
    assert "failed_step_4 (not finite: tasks e" in said
    assert "version 3 is the last published" in said
    assert "advantages are not finite" in done.stdout + done.stderr

    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    # Not started again: the same batch would end the same way.
    assert "trainer" not in summary["restarts"]
    # Step 3 was skipped and counts; step 4 ended the run.
    assert [(row["step"], row["train/skipped_steps"]) for row in rows_of(stack)] == [
        *((1, 0.0), (2, 0.0), (3, 1.0))
    ]
    assert (summary["weight_updates"]["count"], summary["not_current"]) == (3, {})

    batches, info = load_failed_batch(folder)
    assert (info["step"], info["policy_version"], info["ranks"]) == (4, 3, 2)
    assert sorted(task for tasks in info["task_ids"] for task in tasks) == sorted(
        json.loads((stack.run_dir / "batches.jsonl").read_text().splitlines()[-1])["task_ids"]
    )
    assert len(batches) == 2
    again = subprocess.run(
        [sys.executable, "-m", "areal_torch.engines.failed_step", folder, "--model", tiny_model],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    healthy, broken = again.stdout.splitlines()
    assert healthy.startswith("rank 0: finite here: loss ")
    assert broken.startswith("rank 1: advantages are not finite (")
