"""A reward model: one number for an answer, learned from pairs (Bradley-Terry).

The number is read at the answer's last token, which depends on the whole answer. Saved, it is a
folder that transformers reads as a sequence classifier of one class, and SGLang serves with
`--is-embedding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from areal_torch.algorithms import packing, preference
from areal_torch.algorithms.losses import LossResult
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.model.heads import ScalarHead
from areal_torch.engines.preference import count_pairs, mean_over_pairs
from areal_torch.engines.train_api import TrainEngine, as_batches

_HEAD = ScalarHead(shift=0)


def at_last_token(batch: Batch) -> Batch:
    """The batch with a loss mask that is true on each sequence's last token only."""
    mask = torch.zeros_like(batch["loss_mask"])
    mask[batch["cu_seqlens"][1:].long() - 1] = True
    return {**batch, "loss_mask": mask}


def train_reward_model(engine: TrainEngine, batch: Batch) -> dict[str, float]:
    """Takes one step on the mean Bradley-Terry loss of all ranks' pairs; collective.

    Args:
        engine: With an optimizer and `scalar=True`.
        batch: This rank's share: pairs of sequences with the keys group_index and chosen.

    Returns:
        Statistics of `TrainEngine.train_batch`, over pairs; `accuracy` and `margin` as
        `Preference.train`.
    """
    return engine.train_batch(at_last_token(batch), _loss, count_pairs, head=_HEAD)


def evaluate_reward_model(
    engine: TrainEngine, batches: Batch | Iterable[Batch]
) -> dict[str, float]:
    """Returns `loss`, `accuracy` and `margin`, means over the pairs of all batches and ranks.

    Each pair has the same weight, however the pairs are cut into batches. Collective.

    Args:
        engine: With `scalar=True`.
        batches: This rank's share of one batch or of several, such as `OfflineTrainer.chunks`.

    Raises:
        InvalidInput: There is no pair.
    """
    return mean_over_pairs(_sums(engine, at_last_token(batch)) for batch in as_batches(batches))


def _sums(engine: TrainEngine, batch: Batch) -> dict[str, float]:
    loss, sums = _loss(engine.forward(batch, _HEAD), torch.empty(0), batch)
    return engine.reduce_stats({"loss": loss, **sums, "pairs": float(count_pairs(batch))})


def score(engine: TrainEngine, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Returns the score of each prompt with its answer; collective.

    Args:
        engine: With `scalar=True`.
        sequences: Token ids, two or more each.
    """
    packed = packing.pack(
        [{"input_ids": ids, "loss_mask": [False] * len(ids)} for ids in sequences]
    )
    batch = at_last_token(packed)
    scores: list[float] = engine.forward(batch, _HEAD)[batch["loss_mask"]].tolist()
    return scores


def _loss(scores: Tensor, beside: Tensor, batch: Batch) -> LossResult:
    del beside
    margins = preference.pair_margins(scores[batch["cu_seqlens"][1:].long() - 1], batch)
    detached = margins.detach()
    stats = {"accuracy": (detached > 0).sum(), "margin": detached.sum()}
    return preference.bradley_terry_loss(margins).sum(), stats
