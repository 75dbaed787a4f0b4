"""A plain back end in this process, driven as the server drives it, and what transformers says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from areal_inference.decode.request import Request, SamplingParams
from areal_inference.decode.runner import ModelRunner
from areal_inference.decode.scheduler import Scheduler
from areal_inference.model.plain import PlainConfig, PlainModel
from areal_inference.model.plain_cache import PlainCache
from areal_inference.model.weights import WeightSet, load_weights

TOLERANCE = 1e-4


def read(folder: Path, dtype: str = "float32") -> tuple[PlainConfig, WeightSet]:
    config = PlainConfig.from_folder(folder, dtype)
    return config, load_weights(str(folder), config, getattr(torch, dtype))


def serve(folder: Path, dtype: str = "float32", *, max_running: int = 8) -> Scheduler:
    """A scheduler at version 0 around the folder's model."""
    config, weights = read(folder, dtype)
    runner = ModelRunner(
        PlainModel(config, weights),
        PlainCache(128),
        max_total_tokens=100_000,
        max_prefill_tokens=4096,
        seed=0,
    )
    return Scheduler(runner, max_running=max_running, max_prefill_tokens=4096, weight_version="0")


def ask(prompt: Sequence[int], new: int, *, seed: int = 0, **options: Any) -> Request:
    params = SamplingParams(max_new_tokens=new, seed=seed)
    return Request(rid=f"{seed}", input_ids=list(prompt), params=params, **options)


@torch.inference_mode()
def finish(scheduler: Scheduler) -> None:
    """Steps until nothing is left."""
    for _ in range(1000):
        scheduler.step()
        if not scheduler.can_step:
            return
    raise AssertionError("still running after 1000 steps")


@torch.inference_mode()
def expected(hf: Any, request: Request) -> torch.Tensor:
    """transformers' logprobs of the request's output, each from the whole sequence."""
    ids = torch.tensor([request.input_ids + request.output_ids])
    logprobs = hf(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    begin = len(request.input_ids)
    return logprobs[begin - 1 : -1].gather(1, ids[0, begin:, None])[:, 0]


def worst(hf: Any, requests: Sequence[Request]) -> float:
    """The largest difference of a logprob."""
    return max(
        float((expected(hf, each) - torch.tensor(each.logprobs)).abs().max()) for each in requests
    )
