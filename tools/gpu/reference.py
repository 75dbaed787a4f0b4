"""What transformers computes on a CPU in float64, in a process of its own.

Liger and the kernels of recurrent layers take over transformers' functions in the process that
trains, and do not run on a CPU.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

from areal_torch.algorithms import packing

_KERNELS = ("causal_conv1d", "fla", "mamba_ssm")


def begin(path: Path, batch: packing.Batch) -> Future[tuple[list[float], float]]:
    """Writes random weights into the directory; the result: their logprobs, the gradient's norm."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    # Lists, because tensors would be shared through files.
    return _process().submit(_compute, path, {name: x.tolist() for name, x in batch.items()})


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_without_kernels)


def _without_kernels() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in _KERNELS:
        sys.modules[name] = None  # type: ignore[assignment]


def _compute(path: Path, given: dict[str, list[int]]) -> tuple[list[float], float]:
    from transformers import AutoModelForCausalLM

    batch = {name: torch.tensor(values) for name, values in given.items()}
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **kinds)
    parts = []
    for row in packing.unpack(batch):
        ids, mask = row["input_ids"], row["loss_mask"]
        everything = exact(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts.append(everything.gather(-1, ids[1:, None])[:, 0][mask[1:]])
    logprobs = torch.cat(parts)
    torch.autograd.backward(-logprobs.mean())
    norm = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters() if p.grad is not None])
    return logprobs.tolist(), float(norm)
