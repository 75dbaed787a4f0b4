"""Whether the device computes what plain transformers computes on a CPU in float64, per family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tools.gpu.models import batch_of, device, make

from areal.algorithms import packing
from areal.algorithms.losses import sft_loss
from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.engines.fsdp import FSDPEngine

_LENGTHS = [33, 7, 64, 18]


def settings(miniature: bool) -> list[dict[str, Any]]:
    """A tiny model of each shape, in the precision of a GPU run and in float32."""
    shapes = ["qwen2.5-0.5b", "qwen3-8b", "qwen3-30b-a3b"]
    precisions = ["float32"] if miniature else ["bfloat16", "float32"]
    return [{"shape": shape, "dtype": dtype} for shape in shapes for dtype in precisions]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Largest and mean difference of logprobs, in nats; relative difference of gradient norms."""
    del miniature
    path = make(setting["shape"], miniature=True)
    exact, exact_norm = _plain(path)
    engine = FSDPEngine(
        TrainEngineConfig(path=str(path), dtype=setting["dtype"], optimizer=OptimizerConfig(lr=0.0))
    )
    engine.initialize()
    try:
        batch = batch_of(_LENGTHS, 512)
        found = engine.forward(batch)[batch["loss_mask"]].cpu()
        norm = engine.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"]))["grad_norm"]
    finally:
        engine.destroy()
    apart = (found.double() - exact).abs()
    return {
        "on": str(device()),
        "largest": float(f"{apart.max():.2g}"),
        "mean": float(f"{apart.mean():.2g}"),
        "gradient": float(f"{abs(norm - exact_norm) / exact_norm:.2g}"),
    }


def _plain(path: Path) -> tuple[torch.Tensor, float]:
    """Write random weights into the directory; return their logprobs and the gradient's norm."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hf.save_pretrained(path)
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **kinds)
    parts = []
    for row in packing.unpack(batch_of(_LENGTHS, 512)):
        ids, mask = row["input_ids"], row["loss_mask"]
        everything = exact(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts.append(everything.gather(-1, ids[1:, None])[:, 0][mask[1:]])
    logprobs = torch.cat(parts)
    torch.autograd.backward(-logprobs.mean())
    norm = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters() if p.grad is not None])
    return logprobs.detach(), float(norm)
