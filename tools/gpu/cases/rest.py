"""Whether a run trains on this GPU: the whole stack where its packages are, else SFT alone.

SGLang is too large to be carried. Where it is, GPU_KIT_SGLANG is the command that starts it, and
tries with `servers` train what it serves from the same GPU; the CPU engine serves the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tools.gpu.cases import Skipped
from tools.gpu.models import batch_of, engine, make, scratch

from areal_torch.engines.sft import train_lm
from areal_torch.models.tiny import make_tiny_model

_SMALL = (
    *("train_dataset.batch_size=2", "gconfig.n_samples=2"),
    *("warm_start_steps=1", "train_problems=200", "heldout_problems=4"),
)
_STACK = ("grpc", "hiredis", "nats", "omegaconf", "opentelemetry", "orjson", "redis", "uvicorn")
RECIPE = Path(__file__).parents[3] / "examples" / "arithmetic_grpo.py"
_WIDE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Qwen2.5-0.5B but for its vocabulary."""
_MEANS = ("reward/mean", "mismatch/kl", "mismatch/max", "time/publish", "time/train")


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Reward and seconds per step of a run and its resume; or the loss of supervised steps."""
    steps = 2 if miniature else setting["steps"]
    command = os.environ.get("GPU_KIT_SGLANG", "") if "servers" in setting else "cpu"
    if not command:
        raise Skipped("GPU_KIT_SGLANG")
    absent = [name for name in _STACK if find_spec(name) is None]
    if absent:
        return {"stack": f"needs {absent[0]}", **_alone(steps)}
    root = scratch()
    keys = [*(_SMALL if miniature else ()), f"stack.inference_command={command}"]
    if torch.cuda.is_available():
        keys.append("stack.gpus_per_node=1")
    if mode := setting.get("mode", "shared" if "servers" in setting else ""):
        keys.append(f"allocation_mode=sglang:d1|fsdp:d1@{mode}")
    if "ahead" in setting:
        keys.append(f"rollout.max_head_offpolicyness={setting['ahead']}")
    if answer := setting.get("answer"):
        make_tiny_model(root / "model", **({} if miniature else _WIDE))
        keys += [f"gconfig.max_new_tokens={answer}", f"model.context_length={answer + 64}"]
        keys += ["heldout_problems=8", "train_dataset.batch_size=16"]
    resumed = "servers" not in setting
    for total in (steps, 2 * steps) if resumed else (steps,):
        run = [sys.executable, "-m", "areal_launch", "run", str(RECIPE), f"run_root={root}"]
        # The recipe's own path is that of the demo, which would train what a miniature left there.
        run += [f"model.path={root}/model", f"total_train_steps={total}", *keys]
        subprocess.run(run, check=True)
    (file,) = root.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row for row in rows if "time/step" in row][-steps if resumed else 1 :]
    seconds = sum(row["time/step"] for row in rows)
    sampled = sum(row["samples"] * row["rollout/length_mean"] for row in rows)
    return {
        "steps": total,
        "step_s": round(seconds / len(rows), 3),
        "waited": round(sum(row["time/wait"] for row in rows) / seconds, 3),
        "sampled_s": round(sampled / seconds),
        **{name: _mean(rows, name) for name in _MEANS if any(name in row for row in rows)},
    }


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    found = [row[name] for row in rows if name in row]
    return float(f"{sum(found) / len(found):.3g}")


def _alone(steps: int) -> dict[str, Any]:
    """The same rows again and again: the loss falls."""
    batch = batch_of([40] * 8, 261)
    with engine(make("qwen2.5-0.5b", miniature=True), lr=1e-2) as made:
        losses = [train_lm(made, batch)["loss"] for _ in range(steps)]
    return {"first_loss": round(losses[0], 3), "last_loss": round(losses[-1], 3)}
