"""Supervised fine-tuning: maximize the logprob of given tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.algorithms.losses import LossResult, sft_loss
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.train_api import TrainEngine, as_batches


def _loss(logprobs: Tensor, entropies: Tensor, batch: Batch) -> LossResult:
    del entropies
    return sft_loss(logprobs, batch["loss_mask"])


def train_lm(engine: TrainEngine, batch: Batch) -> dict[str, float]:
    """Takes one step on the mean negative log-likelihood of the loss tokens of all ranks.

    Args:
        engine: Has an optimizer.
        batch: This rank's share; needs cu_seqlens, group_index, input_ids, loss_mask.

    Returns:
        Statistics of `TrainEngine.train_batch`; `loss` is the mean negative log-likelihood.
    """
    return engine.train_batch(batch, _loss)


def evaluate_lm(engine: TrainEngine, batches: Batch | Iterable[Batch]) -> float:
    """Returns the mean negative log-likelihood of the loss tokens of all batches and ranks.

    Each token has the same weight, however the rows are cut into batches. Collective.

    Args:
        engine: Any.
        batches: This rank's share of one batch or of several, such as `OfflineTrainer.chunks`.

    Raises:
        InvalidInput: There is no loss token.
    """
    loss = tokens = 0.0
    for batch in as_batches(batches):
        summed, _ = sft_loss(engine.forward(batch), batch["loss_mask"])
        sums = engine.reduce_stats({"loss": summed, "tokens": batch["loss_mask"].sum()})
        loss, tokens = loss + sums["loss"], tokens + sums["tokens"]
    if not tokens:
        raise InvalidInput("evaluate_lm(batches): expected rows with loss tokens, got none")
    return loss / tokens


def pack_examples(examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """Packs (prompt tokens, answer tokens) pairs; the loss is on the answers.

    Example:
        >>> pack_examples([([258, 55, 259], [56, 260])])["loss_mask"].tolist()
        [False, False, False, True, True]
    """
    return packing.pack(
        [
            {
                "input_ids": [*prompt, *answer],
                "loss_mask": [False] * len(prompt) + [True] * len(answer),
            }
            for prompt, answer in examples
        ]
    )


class FSDPLMEngine(FSDPEngine):
    """An FSDP engine with the fine-tuning step as a method."""

    def train_lm(self, batch: Batch) -> dict[str, float]:
        return train_lm(self, batch)
