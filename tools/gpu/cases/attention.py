"""Cost of a step with each attention kernel, with common prefixes computed once or repeatedly."""

from __future__ import annotations

import json
from typing import Any

import torch
from tools.gpu.models import make, timed

from areal.algorithms import packing
from areal.algorithms.losses import sft_loss
from areal.algorithms.packing import Batch
from areal.config.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.engines.fsdp import FSDPEngine
from areal.errors import InvalidInput

_KERNELS = ("varlen", "flash_attention_2", "flash_attention_3", "packed")
_ANSWERS = 8


def settings(miniature: bool) -> list[dict[str, Any]]:
    """Each kernel, with common prefixes computed once and computed for each sequence."""
    tokens = 512 if miniature else 16384
    return [
        {"kernel": kernel, "share": share, "tokens": tokens}
        for kernel in _KERNELS
        for share in (True, False)
    ]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds per step and tokens/s with 1.5B's width, 8 layers; or why a kernel is refused."""
    path = make("qwen2.5-1.5b", miniature, layers=8)
    vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
    batch = _groups(setting["tokens"], vocabulary)
    config = TrainEngineConfig(
        path=str(path),
        init_from_scratch=True,
        optimizer=OptimizerConfig(lr=1e-6),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=2 * setting["tokens"]),
    )
    config.attn_impl, config.share_prefixes = setting["kernel"], setting["share"]
    engine = FSDPEngine(config)
    try:
        engine.initialize()
        seconds = timed(
            lambda: engine.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"])),
            rounds=1 if miniature else 5,
        )
    except InvalidInput as error:
        return {"refused": str(error)}
    finally:
        engine.destroy()
    return {"step_s": round(seconds, 4), "tokens_s": round(len(batch["input_ids"]) / seconds)}


def _groups(tokens: int, vocabulary: int) -> Batch:
    """Groups of answers to one prompt each; a prompt is as long as an answer."""
    generator = torch.Generator().manual_seed(0)
    length = min(512, tokens // (2 * _ANSWERS))

    def draw() -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    groups = max(1, tokens // (2 * _ANSWERS * length))
    mask = [False] * length + [True] * length
    prompts = [draw() for _ in range(groups)]
    sequences = [
        {"input_ids": prompt + draw(), "loss_mask": mask}
        for prompt in prompts
        for _ in range(_ANSWERS)
    ]
    return packing.pack(sequences, [group for group in range(groups) for _ in range(_ANSWERS)])
