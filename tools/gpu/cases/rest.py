"""Whether a run trains on this GPU: the whole stack where its packages are, else SFT alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tools.gpu.models import batch_of, engine, make

from areal_torch.engines.sft import train_lm

_SMALL = (
    *("train_dataset.batch_size=2", "gconfig.n_samples=2"),
    *("warm_start_steps=1", "train_problems=200", "heldout_problems=4"),
)
_STACK = ("grpc", "hiredis", "nats", "omegaconf", "opentelemetry", "orjson", "redis", "uvicorn")
# SGLang is not carried, so the CPU engine serves what the GPU trains.
_ON_GPU = ("stack.gpus_per_node=1", "stack.inference_command=cpu")
RECIPE = Path(__file__).parents[3] / "examples" / "arithmetic_grpo.py"


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Reward and seconds per step of a run and its resume; or the loss of supervised steps."""
    steps = 2 if miniature else setting["steps"]
    absent = [name for name in _STACK if find_spec(name) is None]
    if absent:
        return {"stack": f"needs {absent[0]}", **_alone(steps)}
    root = Path(tempfile.mkdtemp(prefix="gpu-stack-"))
    small = _SMALL if miniature else ()
    placed = _ON_GPU if torch.cuda.is_available() else ()
    if mode := setting.get("mode"):
        placed += (f"allocation_mode=sglang:d1|fsdp:d1@{mode}",)
    for total in (steps, 2 * steps):
        command = [sys.executable, "-m", "areal_launch", "run", str(RECIPE), f"run_root={root}"]
        # The recipe's own path is that of the demo, which would train what a miniature left there.
        model = f"model.path={root}/model"
        subprocess.run([*command, model, f"total_train_steps={total}", *placed, *small], check=True)
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


def _alone(steps: int) -> dict[str, Any]:
    """The same rows again and again: the loss falls."""
    batch = batch_of([40] * 8, 261)
    with engine(make("qwen2.5-0.5b", miniature=True), lr=1e-2) as made:
        losses = [train_lm(made, batch)["loss"] for _ in range(steps)]
    return {"first_loss": round(losses[0], 3), "last_loss": round(losses[-1], 3)}
