"""Speed and memory of a training step, for a shape, lengths, a loss and a mode."""

from __future__ import annotations

import json
import re
import time
import warnings
from typing import Any

import torch
from tools.gpu.models import batch_of, device, engine, groups_of, lengths_of, make, timed

from areal.algorithms.losses import add_up, ppo_actor_loss, sft_loss
from areal.algorithms.packing import Batch
from areal.config.training import LoraConfig
from areal.engines.fsdp import FSDPEngine


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds per step, tokens/s, MFU, and the memory that was estimated."""
    path = make(setting["shape"], miniature, layers=setting.get("layers", 0))
    vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
    tokens = 256 if miniature else setting["tokens"]
    batches = [_batch(setting["lengths"], tokens, vocabulary, seed) for seed in (1, 2)]
    keys = {
        "gradient_checkpointing": setting.get("recompute"),
        "kernels": setting.get("kernels"),
        "share_prefixes": setting.get("share"),
        "lora": LoraConfig() if setting.get("lora") else None,
    }
    stats: dict[str, float] = {}
    with engine(path, tokens=tokens, **keys) as made:

        def step(index: int) -> None:
            began = time.perf_counter()
            stats.update(_step(made, batches[index % 2], setting.get("loss", "sft")))
            stats.setdefault("first_s", time.perf_counter() - began)

        seconds, spread = timed(step, rounds=1 if miniature else 5, warm=1 if miniature else 2)
        result: dict[str, Any] = {
            "step_s": round(seconds, 4),
            "spread": spread,
            "first_s": round(stats["first_s"], 2),
            "tokens_s": round(len(batches[0]["input_ids"]) / seconds),
            "mfu": round(stats.get("mfu", 0.0), 4),
            "micro_batches": stats["n_micro_batches"],
            **_estimate(made),
        }
        if setting.get("profile"):
            result |= {"syncs": _syncs(lambda: step(0)), "kernels_ms": _profile(lambda: step(1))}
    return result


def _batch(lengths: str, tokens: int, vocabulary: int, seed: int) -> Batch:
    if lengths == "groups":
        return groups_of(tokens, vocabulary, seed=seed)
    trained = 1.0 if lengths == "one" else 0.5
    return batch_of(lengths_of(tokens, lengths), vocabulary, trained=trained, seed=seed)


def _step(made: FSDPEngine, batch: Batch, loss: str) -> dict[str, float]:
    if loss == "sft":
        return made.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"]))
    return made.train_batch(
        batch,
        lambda p, _, mb: add_up(
            *ppo_actor_loss(p, p.detach(), torch.ones_like(p), mb["loss_mask"]), mb["loss_mask"]
        ),
    )


def _estimate(made: FSDPEngine) -> dict[str, Any]:
    budget = made.step._budget
    if budget is None or budget.need is None:
        return {}
    return {"recompute": budget.mode, "estimate_gib": round(budget.need.total / 2**30, 2)}


def _syncs(run: Any) -> int:
    """How often a step waits for the GPU."""
    if device().type != "cuda":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in said)


def _profile(run: Any) -> dict[str, float]:
    """Milliseconds of the twelve kernels that take most."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device().type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as ran:
        run()
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    spent = {re.sub(r"[<(].*", "", each.key)[-60:]: 0.0 for each in ran.key_averages()}
    for each in ran.key_averages():
        spent[re.sub(r"[<(].*", "", each.key)[-60:]] += getattr(each, column) / 1e3
    most = sorted(spent.items(), key=lambda item: -item[1])[:12]
    return {name: round(ms, 2) for name, ms in most}
