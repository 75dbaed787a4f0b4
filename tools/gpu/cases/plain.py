"""A training step compared with a typical one of transformers, in the same process."""

from __future__ import annotations

import gc
from typing import Any

import torch
from tools.gpu.cases import speed
from tools.gpu.models import batch_of, device, lengths_of, make, timed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_torch.algorithms import packing

_CHUNK = 1024


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds of both; the ratio is above 1 where ours is faster."""
    ours = speed.measure(setting, miniature)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, spread = _plain(setting, miniature)
    return {
        "step_s": ours["step_s"],
        "plain_step_s": round(seconds, 4),
        "spread": max(spread, ours["spread"]),
        "ratio": round(seconds / ours["step_s"], 3),
    }


def _plain(setting: dict[str, Any], miniature: bool) -> tuple[float, float]:
    """Padded rows, autocast, fused AdamW, recomputed layers, and a loss in chunks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        make(setting["shape"], miniature, layers=setting.get("layers", 0))
    )
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    if not miniature:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = 256 if miniature else setting["tokens"]
    batch = batch_of(lengths_of(tokens, setting["lengths"]), config.vocab_size)
    rows = packing.unpack(batch)
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(key: str) -> Tensor:
        parts = [torch.nn.functional.pad(r[key], (0, longest - len(r[key]))) for r in rows]
        return torch.stack(parts).to(device())

    ids, mask = padded("input_ids"), padded("loss_mask")[:, 1:]
    there = torch.stack([torch.arange(longest) < len(row["input_ids"]) for row in rows])
    there = there.to(device())

    def part_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, model.get_output_embeddings().weight)
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")

    def step(_: int) -> None:
        with torch.autocast(device().type, torch.bfloat16):
            hidden = model.model(ids, attention_mask=there, use_cache=False).last_hidden_state
            chosen, labels = hidden[:, :-1][mask], ids[:, 1:][mask]
            # Chunks are recomputed, so whole logits never exist.
            parts = zip(chosen.split(_CHUNK), labels.split(_CHUNK), strict=True)
            losses = [checkpoint(part_loss, x, y, use_reentrant=False) for x, y in parts]
        torch.autograd.backward(torch.stack(losses).sum() / len(labels))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, rounds=1 if miniature else 5, warm=1 if miniature else 2)
