"""Losses over pairs of answers, one of which is preferred. Each is short; all share one margin.

With s a score of each answer, c the chosen one and r the rejected one, y the answers' tokens:

| loss           | s of an answer                        | loss of a pair                        |
|----------------|---------------------------------------|---------------------------------------|
| Bradley-Terry  | the reward model's number             | -log sigmoid(s_c - s_r)               |
| DPO            | log pi(y) - log pi_ref(y)             | -log sigmoid(beta (s_c - s_r))        |
| IPO            | (log pi(y) - log pi_ref(y)) / len(y)  | (s_c - s_r - 1 / (2 beta))^2          |
| SimPO          | log pi(y) / len(y)                    | -log sigmoid(beta (s_c - s_r) - gamma)|

DPO: arXiv:2305.18290 equation 7. IPO: arXiv:2310.12036 equation 17, with the mean over tokens that
its authors used, as TRL does. SimPO: arXiv:2405.14734 equation 6. Margins are [P], one a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_torch.algorithms import packing
from areal_torch.algorithms.packing import Batch

LOSSES = ("dpo", "ipo", "simpo")


def answer_logprobs(logprobs: Tensor, batch: Batch, *, mean: bool) -> Tensor:
    """Adds up, or averages, the logprobs of each sequence's loss tokens.

    Args:
        logprobs: [T], 0 outside the loss mask or not.
        batch: Needs loss_mask and cu_seqlens.
        mean: Divide by the number of loss tokens.

    Returns:
        [S], with the gradient of `logprobs`.
    """
    index = packing.sequence_index(batch["cu_seqlens"])
    mask, count = batch["loss_mask"], len(batch["cu_seqlens"]) - 1
    sums = logprobs.new_zeros(count).index_add(0, index, torch.where(mask, logprobs, 0.0))
    if not mean:
        return sums
    lengths = logprobs.new_zeros(count).index_add(0, index, mask.to(logprobs.dtype))
    return sums / lengths.clamp(min=1.0)


def pair_margins(scores: Tensor, batch: Batch) -> Tensor:
    """Subtracts the rejected answer's score from the chosen one's.

    Args:
        scores: [S].
        batch: Needs group_index, the two answers of a pair beside each other, and chosen.

    Returns:
        [P], in the order of the pairs.
    """
    group = batch["group_index"]
    pair = torch.cat([group[:1] * 0, (group[1:] != group[:-1]).long().cumsum(0)])
    signed = torch.where(batch["chosen"], scores, -scores)
    count = int(pair[-1]) + 1 if len(pair) else 0
    return scores.new_zeros(count).index_add(0, pair, signed)


def bradley_terry_loss(margins: Tensor) -> Tensor:
    """-log sigmoid(s_c - s_r) of each pair; `margins` [P] of a reward model's scores."""
    return -torch.nn.functional.logsigmoid(margins)


def dpo_loss(margins: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta m) of each pair; `margins` [P] of summed log ratios."""
    return -torch.nn.functional.logsigmoid(beta * margins)


def ipo_loss(margins: Tensor, beta: float) -> Tensor:
    """(m - 1 / (2 beta))^2 of each pair; `margins` [P] of mean log ratios."""
    return (margins - 1.0 / (2.0 * beta)).square()


def simpo_loss(margins: Tensor, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(beta m - gamma) of each pair; `margins` [P] of mean logprobs."""
    return -torch.nn.functional.logsigmoid(beta * margins - gamma)
