"""Speed and memory of a training step, for a shape, lengths, a loss and a mode."""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

import torch
from tools.gpu.cases import Skipped
from tools.gpu.models import (
    batch_of,
    device,
    engine,
    groups_of,
    lengths_of,
    make,
    timed,
    vocabulary_of,
    wait,
)

from areal.config.training import LoraConfig
from areal_torch.algorithms.losses import add_up, ppo_actor_loss, sft_loss
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.fsdp import FSDPEngine


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds per step, tokens/s, MFU, and the memory that was estimated."""
    if setting.get("attention") and device().type == "cpu":
        raise Skipped("a GPU")
    tokens = 256 if miniature else setting["tokens"]
    path = make(setting["shape"], miniature, layers=setting.get("layers", 0), positions=tokens)
    vocabulary = vocabulary_of(path)
    # Compiled code is made for a number of tokens at first, then for any.
    counts = (tokens, tokens - tokens // 16 if setting.get("vary") else tokens)
    batches = [_batch(setting["lengths"], n, vocabulary, 1 + i) for i, n in enumerate(counts)]
    keys = {
        "gradient_checkpointing": setting.get("recompute"),
        "kernels": setting.get("kernels"),
        "attn_impl": setting.get("attention"),
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
            "tokens_s": round(sum(len(b["input_ids"]) for b in batches) / 2 / seconds),
            "mfu": round(stats.get("mfu", 0.0), 4),
            "micro_batches": stats["n_micro_batches"],
            **_estimate(made),
        }
        if setting.get("profile"):
            result |= {"syncs": _syncs(lambda: step(0)), **_profile(lambda: step(1))}
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


def _profile(run: Any) -> dict[str, Any]:
    """Milliseconds of all kernels, and of the twelve kernels and operators that take most."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as ran:
        run()
        wait()
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels, operators = dict[str, float](), dict[str, float]()
    for each in ran.key_averages():
        if each.is_user_annotation:  # spans of other kernels
            continue
        name, ms = re.sub(r"[<(].*", "", each.key)[-60:], getattr(each, column) / 1e3
        # An operator's time is that of the kernels it launched.
        chosen = operators if "::" in each.key and each.device_type == DeviceType.CPU else kernels
        chosen[name] = chosen.get(name, 0.0) + ms
    most = {
        f"{kind}_ms": dict(sorted(((n, round(ms, 2)) for n, ms in found.items()), key=_ms)[:12])
        for kind, found in (("kernels", kernels), ("operators", operators))
    }
    return {"busy_ms": round(sum((kernels if on_gpu else operators).values()), 1), **most}


def _ms(item: tuple[str, float]) -> float:
    return -item[1]
