"""How long a trainer takes to leave the GPU to others, and to have it back (@alternating)."""

from __future__ import annotations

import time
from typing import Any

import torch
from tools.gpu.models import batch_of, engine, make, vocabulary_of, wait

from areal_torch.algorithms.losses import sft_loss


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds of each way, what stays on the GPU meanwhile, and whether a step is unchanged."""
    path = make(setting["shape"], miniature)
    batch = batch_of([64], vocabulary_of(path))
    result: dict[str, float] = {}
    with engine(path, lr=0.0) as made:

        def loss() -> float:
            return made.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"]))["loss"]

        before = loss()
        for kind in ("first_", ""):  # the first makes its host memory
            wait()
            started = time.perf_counter()
            made.to_host()
            result[f"{kind}away_s"] = time.perf_counter() - started
            if torch.cuda.is_available():
                result["left_gib"] = torch.cuda.memory_reserved() / 2**30
            started = time.perf_counter()
            made.to_device()
            wait()
            result[f"{kind}back_s"] = time.perf_counter() - started
        result["difference"] = abs(loss() - before)
    return {name: round(value, 3) for name, value in result.items()}
