"""Whether the whole stack trains with the trainer on this GPU and the CPU engine as server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SMALL = (
    *("train_dataset.batch_size=2", "gconfig.n_samples=2"),
    *("warm_start_steps=1", "train_problems=200", "heldout_problems=4"),
)
RECIPE = Path(__file__).parents[3] / "examples" / "arithmetic_grpo.py"


def settings(miniature: bool) -> list[dict[str, Any]]:
    """The number of steps; a second command resumes and trains equally many more."""
    return [{"steps": 2 if miniature else 20}]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Reward, seconds per step, and the share of time that the trainer waited, after a resume."""
    root, steps = Path(tempfile.mkdtemp(prefix="gpu-stack-")), setting["steps"]
    small = _SMALL if miniature else ()
    for total in (steps, 2 * steps):
        command = [sys.executable, "-m", "areal_launch", "run", str(RECIPE), f"run_root={root}"]
        # The recipe's own path is that of the demo, which would train what a miniature left there.
        model = f"model.path={root}/model"
        subprocess.run([*command, model, f"total_train_steps={total}", *small], check=True)
    (file,) = root.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row for row in rows if "time/step" in row][-steps:]
    seconds = sum(row["time/step"] for row in rows)
    return {
        "steps": 2 * steps,
        "reward": round(sum(row["reward/mean"] for row in rows) / len(rows), 3),
        "step_s": round(seconds / len(rows), 3),
        "waited": round(sum(row["time/wait"] for row in rows) / seconds, 3),
    }
