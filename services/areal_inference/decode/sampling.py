"""Vectorized sampling: one token and its logprob per row of a batch.

A token is drawn by inverting the cumulative distribution with one uniform number per row, so a
seeded request needs one number per token and nothing of vocabulary size but two passes.

The logprob reported is log_softmax(logits / temperature) of the drawn token, before top-k and
top-p, and of the raw logits for greedy rows: SGLang's definition. Tokens that a grammar or
`min_new_tokens` forbids have no part in it, there and here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_inference.decode.request import SamplingParams

_MASK64 = (1 << 64) - 1


class SamplingBatch:
    """Per-row sampling settings as tensors; rebuilt when the batch's membership changes."""

    def __init__(self, rows: Sequence[SamplingParams]):
        self.size = len(rows)
        self.any_greedy = any(p.greedy for p in rows)
        self.all_greedy = all(p.greedy for p in rows)
        self.scaled = any(p.temperature != 1.0 and not p.greedy for p in rows)
        temperatures = [1.0 if p.greedy else p.temperature for p in rows]
        self.temperature = torch.tensor(temperatures).unsqueeze(1) if self.scaled else None
        self.greedy = torch.tensor([p.greedy for p in rows]) if self.any_greedy else None
        filtered = [
            i for i, p in enumerate(rows) if not p.greedy and (p.top_p < 1.0 or p.top_k > 0)
        ]
        self.filtered = torch.tensor(filtered) if filtered else None
        self.top_p = torch.tensor([rows[i].top_p for i in filtered]).unsqueeze(1)
        self.top_k = torch.tensor(
            [rows[i].top_k if rows[i].top_k > 0 else 1 << 40 for i in filtered]
        ).unsqueeze(1)
        self.seeds = [(i, p.seed) for i, p in enumerate(rows) if p.seed is not None]
        self.min_new_tokens = [
            (i, p.min_new_tokens, sorted(p.stop_ids))
            for i, p in enumerate(rows)
            if p.min_new_tokens > 0 and p.stop_ids
        ]


def seeded_uniform(seed: int, index: int) -> float:
    """Returns a uniform number in [0, 1) for a seeded request's index-th token (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


def sample(
    logits: Tensor, batch: SamplingBatch, generated: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws a token per row.

    Args:
        logits: [rows, vocab] float32; overwritten.
        batch: Settings of the same rows.
        generated: Tokens generated so far, per row.
        generator: Source of randomness for rows without a seed.

    Returns:
        Tokens [rows] int64 and logprobs [rows] float32.
    """
    for row, minimum, stop_ids in batch.min_new_tokens:
        if generated[row] < minimum:
            logits[row, stop_ids] = -torch.inf
    if batch.temperature is not None:
        logits = logits.div_(batch.temperature)
    logprobs = torch.log_softmax(logits, dim=-1)
    if batch.all_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = _draw(logprobs, batch, generated, generator)
        if batch.greedy is not None:
            tokens = torch.where(batch.greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _draw(
    logprobs: Tensor, batch: SamplingBatch, generated: Sequence[int], generator: torch.Generator
) -> Tensor:
    uniform = torch.rand(batch.size, 1, generator=generator)
    for row, seed in batch.seeds:
        uniform[row] = seeded_uniform(seed, generated[row])
    probabilities = logprobs.exp()
    tokens = _invert(probabilities, uniform)
    if batch.filtered is not None:
        rows = batch.filtered
        ordered, token_ids = probabilities[rows].sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        rank = torch.arange(ordered.shape[1])
        ordered.masked_fill_((before > batch.top_p) | (rank >= batch.top_k), 0.0)
        chosen = _invert(ordered, uniform[rows])
        tokens[rows] = token_ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
    return tokens


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index drawn per row in proportion to weights [rows, n], given uniform [rows, 1] in [0, 1)."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding could lift uniform * total to total itself, which lies beyond the last weight; a
    # strict comparison below it also never lands on a weight of zero.
    at = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros(())))
    return (
        torch.searchsorted(cumulative, at, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
    )
