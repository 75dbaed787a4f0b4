"""Tiny models of the families in docs/models.md, and what transformers computes with them."""

from pathlib import Path
from typing import Any

import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch
from tools.tiny_architectures import tiny_model

from areal_torch.engines.model import guards


def saved(kind: str, folder: Path, scale: float = 1.0, **changes: Any) -> Any:
    """A family's tiny model, its matrices times `scale`, which is also written to `folder`.

    See `tiny_config` for `changes`.
    """
    torch.set_num_threads(1)
    hf = tiny_model(kind, 0, changes=changes)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
    hf.save_pretrained(folder)
    return hf


def text_batch(hf: Any, seed: int = 0) -> Any:
    """Sequences with common prefixes, without tokens that stand for images."""
    reserved = torch.tensor(guards.placeholders(hf.config))
    batch = make_batch(seed, groups=2, vocabulary=96)
    batch["input_ids"][torch.isin(batch["input_ids"], reserved)] = 3
    return batch


@torch.no_grad()
def alone(hf: Any, batch: Any) -> torch.Tensor:
    """Logprobs of a class of transformers, one sequence at a time."""
    parts = []
    for begin, end in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True):
        ids = batch["input_ids"][begin:end]
        logits = hf(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        parts.append(torch.cat([found.new_zeros(1), found]))
    return torch.cat(parts) * batch["loss_mask"]
