"""DPO, IPO and SimPO: a policy learns from pairs of answers, without a reward model.

reference, frozen --> logprobs --> reference_logprobs [T] of the batch
                                          |
policy --> logprobs [T] --> a score of each answer --> margin of each pair --> loss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.algorithms import preference
from areal.algorithms.losses import LossResult
from areal.algorithms.packing import Batch
from areal.engines.train_api import TrainEngine
from areal.errors import InvalidInput

PreferenceLoss = Literal["dpo", "ipo", "simpo"]


def count_pairs(batch: Batch) -> int:
    """Return the number of pairs of a batch."""
    return int(batch["chosen"].sum())


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
        """Take one step on the mean loss of all ranks' pairs; collective.

        Args:
            engine: has an optimizer.
            batch: this rank's share, from `pack_pairs`; all losses but SimPO need
                reference_logprobs, float32 [T].

        Returns:
            Statistics of `TrainEngine.train_batch`, over pairs; `accuracy` is the share of pairs
            whose chosen answer has the higher score, `margin` the mean difference.

        Raises:
            InvalidInput: a key is missing.
        """
        self._check(batch)
        return engine.train_batch(batch, self._loss, count_pairs)

    def evaluate(self, engine: TrainEngine, batch: Batch) -> dict[str, float]:
        """Return `loss`, `accuracy` and `margin` over all ranks' pairs; collective."""
        self._check(batch)
        loss, sums = self._loss(engine.forward(batch), torch.empty(0), batch)
        total = engine.reduce_stats({**sums, "loss": loss, "pairs": float(count_pairs(batch))})
        return {name: total[name] / max(total["pairs"], 1.0) for name in ("loss", *sums)}

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
