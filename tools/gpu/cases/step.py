"""Speed of a training step, compared with a typical step of transformers in the same process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tools.gpu.models import batch_of, device, lengths_of, make, timed
from torch import Tensor

from areal.algorithms import packing
from areal.algorithms.losses import sft_loss
from areal.config.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.engines.fsdp import FSDPEngine

_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def settings(miniature: bool) -> list[dict[str, Any]]:
    """Shapes from small to wide; wide ones have fewer layers, so their states fit into one GPU."""
    tokens = 256 if miniature else 16384
    chosen = [
        {"shape": "qwen2.5-0.5b"},
        {"shape": "qwen2.5-1.5b"},
        {"shape": "qwen2.5-7b", "layers": 8},
        {"shape": "qwen3-30b-a3b", "layers": 4},
    ]
    kinds = ("even", "long")
    return [{**each, "tokens": tokens, "lengths": kind} for each in chosen for kind in kinds]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds per step, tokens/s, MFU and ratio; both recompute their layers on a GPU."""
    path = make(setting["shape"], miniature, layers=setting.get("layers", 0))
    config = json.loads((path / "config.json").read_text())
    lengths = lengths_of(setting["tokens"], setting["lengths"])
    batch = batch_of(lengths, config["vocab_size"])
    rounds = 1 if miniature else 5
    ours = _ours(path, batch, setting["tokens"], rounds)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    result = {"step_s": ours, "tokens_s": sum(lengths) / ours, "ours_gib": peak / 2**30}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for gpu, flops in _PEAK.items():
        if gpu in name:
            result["mfu"] = _flops(config, lengths) / ours / flops
    try:
        plain = _plain(path, batch, rounds)
        result |= {"plain_step_s": plain, "ratio": plain / ours}
    except torch.OutOfMemoryError:
        result["plain_out_of_memory"] = True
    return {key: round(value, 4) for key, value in result.items()}


def _flops(config: dict[str, Any], lengths: list[int]) -> float:
    """Of a step's forward and backward pass, without what is recomputed.

    6 per token and weight that takes part in a product, and 6 x layers x width x length per token
    of causal attention (half of the square).
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    width = heads * config.get("head_dim", hidden // heads)
    attention = hidden * (2 * width + 2 * width * kv // heads)
    used = config["intermediate_size"]
    if "num_experts" in config:
        used = config["moe_intermediate_size"] * config["num_experts_per_tok"]
    weights = layers * (attention + 3 * hidden * used) + hidden * config["vocab_size"]
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    return 6.0 * weights * tokens + 6.0 * layers * width * squares


def _ours(path: Path, batch: packing.Batch, tokens: int, rounds: int) -> float:
    engine = FSDPEngine(
        TrainEngineConfig(
            path=str(path),
            init_from_scratch=True,
            optimizer=OptimizerConfig(lr=1e-6),
            mb_spec=MicroBatchSpec(max_tokens_per_mb=tokens),
        )
    )
    engine.initialize()
    try:
        return timed(
            lambda: engine.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"])),
            rounds=rounds,
        )
    finally:
        engine.destroy()


def _plain(path: Path, batch: packing.Batch, rounds: int) -> float:
    """A step with padded rows, autocast over float32 weights, fused AdamW and recomputed layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    model.to(device())
    if device().type == "cuda":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = packing.unpack(batch)
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(key: str) -> Tensor:
        parts = [torch.nn.functional.pad(r[key], (0, longest - len(r[key]))) for r in rows]
        return torch.stack(parts).to(device())

    ids, mask = padded("input_ids"), padded("loss_mask")
    there = torch.stack([torch.arange(longest) < len(row["input_ids"]) for row in rows]).to(
        device()
    )

    def step() -> None:
        # As many rows at once as fit 16,384 padded tokens.
        at_once = max(1, 16384 // longest)
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            with torch.autocast(device().type, torch.bfloat16):
                logits = model(ids[part], attention_mask=there[part], use_cache=False).logits
            logprobs = logits[:, :-1].float().log_softmax(-1)
            chosen = logprobs.gather(-1, ids[part, 1:, None])[..., 0]
            (-(chosen * mask[part, 1:]).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, rounds=rounds)
