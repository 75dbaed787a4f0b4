"""What the runs on clusters share: arguments, and the books."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.stack_tools import RunningStack

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "arithmetic_grpo.py"
BATCH, SAMPLES = 8, 4


def arguments(model: Path, trial: str, steps: int, allocation: str) -> list[str]:
    return [
        str(RECIPE),
        f"model.path={model}",
        f"trial_name={trial}",
        f"total_train_steps={steps}",
        f"allocation_mode={allocation}",
        f"train_dataset.batch_size={BATCH}",
        f"gconfig.n_samples={SAMPLES}",
        "heldout_problems=20",
        "train_problems=400",
        "rollout.max_concurrent_rollouts=32",
        "checkpoint.freq_steps=1",
    ]


def rows_of(stack: RunningStack) -> list[dict[str, Any]]:
    file = stack.run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def check_books(summary: dict[str, Any], steps: int) -> None:
    """Every task is somewhere, none is left over, and what was trained is steps x B."""
    accounts = dict(summary["accounting"])
    assert accounts.pop("submitted") == sum(accounts.values())
    assert accounts["trained"] == steps * BATCH
    assert accounts["dead_lettered"] == accounts["rejected"] == accounts["expired"] == 0
    for live in ("queued", "running", "completed", "batched"):
        assert accounts[live] == 0, f"a finished run cancels its surplus: {accounts}"
    assert 0 <= summary["staleness"]["max"] <= 2
