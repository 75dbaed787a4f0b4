"""Cost of the language-model head, forward and backward, by chunk size."""

from __future__ import annotations

from typing import Any

import torch
from tools.gpu.models import device, make, timed
from transformers import AutoConfig, AutoModelForCausalLM

from areal_torch.engines.model.heads import chosen_logprobs


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Milliseconds of forward and backward of 1.5B's head, and its memory without the inputs."""
    config = AutoConfig.from_pretrained(make("qwen2.5-1.5b", miniature, layers=1))
    dtype = torch.float32 if miniature else torch.bfloat16
    tokens, chunk = (64, setting["chunk"] // 128) if miniature else (8192, setting["chunk"])
    with device():  # drawing the embedding takes a CPU half a minute
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shape = (tokens, config.hidden_size)
    hidden = torch.randn(shape, device=device(), dtype=dtype, requires_grad=True)
    labels = torch.randint(config.vocab_size, shape[:1], device=device())

    def run(_: int) -> None:
        logprobs, _entropies = chosen_logprobs(
            hf, hidden, labels, 1.0, chunk_elements=chunk * config.vocab_size
        )
        torch.autograd.backward(logprobs.sum())
        hf.zero_grad()

    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    seconds, spread = timed(run, at_most_s=2)
    result = {"ms": round(seconds * 1e3, 2), "spread": spread}
    if torch.cuda.is_available():
        result["above_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    return result
