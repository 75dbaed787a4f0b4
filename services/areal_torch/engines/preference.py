"""DPO, IPO and SimPO: a policy learns from pairs of answers, without a reward model.

reference, frozen --> logprobs --> reference_logprobs [T] of the batch
                                          |
policy --> logprobs [T] --> a score of each answer --> margin of each pair --> loss
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal_torch.algorithms import preference
from areal_torch.algorithms.losses import LossResult
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.train_api import TrainEngine, as_batches

PreferenceLoss = Literal["dpo", "ipo", "simpo"]


def count_pairs(batch: Batch) -> int:
    """Returns the number of pairs of a batch."""
    return int(batch["chosen"].sum())


def mean_over_pairs(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns each statistic per pair, from its sums over batches, which count their `pairs`.

    Raises:
        InvalidInput: There is no pair.
    """
    total: dict[str, float] = {}
    for each in sums:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    pairs = total.pop("pairs", 0.0)
    if not pairs:
        raise InvalidInput("evaluation of pairs: expected at least one pair, got none")
    return {name: value / pairs for name, value in total.items()}


@dataclass(frozen=True)
class Preference:
    """How pairs become a loss.

    Example:
        >>> batch["reference_logprobs"] = reference.forward(batch)
        >>> stats = Preference("dpo").train(engine, batch)
    """

    loss: PreferenceLoss = "dpo"
    """`dpo`, `ipo` or `simpo`; the last needs no reference."""
    beta: float = 0.1
    """How far the policy may leave the reference: less with a larger one. SimPO uses 2 to 10."""
    gamma: float = 0.5
    """The margin that SimPO asks for."""

    @property
    def needs_reference(self) -> bool:
        return self.loss != "simpo"

    def train(self, engine: TrainEngine, batch: Batch) -> dict[str, float]:
        """Takes one step on the mean loss of all ranks' pairs; collective.

        Args:
            engine: Has an optimizer.
            batch: This rank's share: pairs of sequences with the keys group_index and chosen. All
                losses but SimPO need reference_logprobs, float32 [T].

        Returns:
            Statistics of `TrainEngine.train_batch`, over pairs; `accuracy` is the share of pairs
            whose chosen answer has the higher score, `margin` the mean difference.

        Raises:
            InvalidInput: A key is missing.
        """
        self._check(batch)
        return engine.train_batch(batch, self._loss, count_pairs)

    def evaluate(self, engine: TrainEngine, batches: Batch | Iterable[Batch]) -> dict[str, float]:
        """Returns `loss`, `accuracy` and `margin`, means over the pairs of all batches and ranks.

        Each pair has the same weight, however the pairs are cut into batches. Collective.

        Args:
            engine: Any.
            batches: This rank's share of one batch or of several, each as for `train`.

        Raises:
            InvalidInput: A key is missing, or there is no pair.
        """
        return mean_over_pairs(self._sums(engine, batch) for batch in as_batches(batches))

    def _sums(self, engine: TrainEngine, batch: Batch) -> dict[str, float]:
        self._check(batch)
        loss, sums = self._loss(engine.forward(batch), torch.empty(0), batch)
        return engine.reduce_stats({"loss": loss, **sums, "pairs": float(count_pairs(batch))})

    def _check(self, batch: Batch) -> None:
        needed = ["chosen", *(["reference_logprobs"] if self.needs_reference else [])]
        for key in needed:
            if key not in batch:
                raise InvalidInput(f"batch has no {key!r}: {self.loss} needs it")

    def _loss(self, logprobs: Tensor, entropies: Tensor, batch: Batch) -> LossResult:
        del entropies
        values = logprobs
        if self.needs_reference:
            values = values - batch["reference_logprobs"]
        scores = preference.answer_logprobs(values, batch, mean=self.loss != "dpo")
        margins = preference.pair_margins(scores, batch)
        if self.loss == "simpo":
            losses = preference.simpo_loss(margins, self.beta, self.gamma)
        elif self.loss == "ipo":
            losses = preference.ipo_loss(margins, self.beta)
        else:
            losses = preference.dpo_loss(margins, self.beta)
        detached = margins.detach()
        return losses.sum(), {"accuracy": (detached > 0).sum(), "margin": detached.sum()}
