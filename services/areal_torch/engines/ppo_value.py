"""PPO's critic: values of states, and their clipped loss. No service is called here."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal_torch.algorithms import advantages as adv
from areal_torch.algorithms import losses, packing
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.model.heads import ScalarHead
from areal_torch.engines.ppo import combine
from areal_torch.engines.train_api import TrainEngine

# Values may move this far in an update: AReaL's and TRL's.
_EPS_CLIP = 0.2


class PPOCritic:
    """Trains a value model on batches of trajectories.

    Example:
        >>> critic = PPOCritic(engine, n_minibatches=1)
        >>> batch["values"] = critic.compute_values(batch)
        >>> actor.compute_advantages(batch)
        >>> stats = critic.ppo_update(batch)
    """

    def __init__(self, engine: TrainEngine, n_minibatches: int) -> None:
        """Trains `engine`'s model, which has a scalar head, `n_minibatches` steps a batch."""
        self.engine = engine
        self.n_minibatches = n_minibatches

    def compute_values(self, batch: Batch) -> Tensor:
        """Returns the value of the state before each loss token, [T], 0 elsewhere; collective.

        A batch with `truncated` gets `bootstrap_values`, [S]: the value of the state after the last
        token of a sequence that was cut off, which `PPOActor.compute_advantages` counts as what the
        rest would have brought; 0 for the others, which ended there.
        """
        values = self.engine.forward(batch, ScalarHead())
        if "truncated" in batch:
            batch["bootstrap_values"] = self._values_after(batch, values)
        return values

    def _values_after(self, batch: Batch, values: Tensor) -> Tensor:
        """Returns values after the last tokens of truncated sequences, [S]; 0 for the others."""
        bounds, found = batch["cu_seqlens"].long(), values.new_zeros(len(batch["truncated"]))
        cut = torch.nonzero(batch["truncated"] & (bounds.diff() > 1)).flatten()
        if not self.engine.reduce_stats({"cut": float(len(cut))})["cut"]:
            return found
        part = packing.select(batch, cut.tolist())
        ends = part["cu_seqlens"][1:].long() - 1
        mask = torch.zeros_like(part["loss_mask"])
        mask[ends] = True
        found[cut] = self.engine.forward({**part, "loss_mask": mask}, ScalarHead(shift=0))[ends]
        return found

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """Takes an optimizer step with each minibatch; collective.

        Args:
            batch: This rank's share, with `values`, and with `returns` from
                `PPOActor.compute_advantages`.

        Returns:
            Statistics, equal on all ranks: those of `TrainEngine.train_batch`, `clip_ratio`, and of
            the batch before the update `reward` (mean over sequences), `value` and `return` (means
            over tokens) and `explained_variance`: the fraction of the returns' variance that the
            values predict, at most 1; 0 where all returns are equal.

        Raises:
            InvalidInput: `values` or `returns` is missing.
            TrainingDiverged: As `TrainEngine.train_batch` does.
        """
        started = time.perf_counter()
        for name, source in (("values", "compute_values()"), ("returns", "compute_advantages()")):
            if name not in batch:
                raise InvalidInput(f"batch has no {name!r}: expected {source} first")
        stats = self._describe(batch)
        parts = [batch]
        if self.n_minibatches > 1:
            split = packing.split_minibatches(batch, self.n_minibatches)
            parts = [packing.select(batch, indices) for indices in split]
        stats |= combine([self.take_step(part) for part in parts])
        del stats["entropy"]  # of a distribution, which a value has none of
        return stats | {"update_seconds": time.perf_counter() - started}

    def take_step(self, batch: Batch) -> dict[str, float]:
        """Takes one optimizer step, as `TrainEngine.train_batch`; collective."""
        return self.engine.train_batch(batch, self._loss, head=ScalarHead())

    def _loss(self, values: Tensor, _: Tensor, batch: Batch) -> losses.LossResult:
        center, returns, mask = batch["values"], batch["returns"], batch["loss_mask"]
        return losses.value_loss(values, center, returns, mask, eps_clip=_EPS_CLIP)

    def _describe(self, batch: Batch) -> dict[str, float]:
        """Statistics of the batch before the update, over all ranks."""
        mask = batch["loss_mask"]
        values, returns = batch["values"][mask].double(), batch["returns"][mask].double()
        errors = returns - values
        rewards = adv.sequence_sums(batch["rewards"], batch["cu_seqlens"])
        total = self.engine.reduce_stats(
            {
                "tokens": mask.sum(),
                "value": values.sum(),
                "return": returns.sum(),
                "error": errors.sum(),
                "reward": rewards.sum(),
                "sequences": float(len(rewards)),
            }
        )
        count = max(total["tokens"], 1.0)
        mean, error = total["return"] / count, total["error"] / count
        # Around the means of all ranks: sums of squares alone would lose what they differ by.
        spread = self.engine.reduce_stats(
            {"return": (returns - mean).square().sum(), "error": (errors - error).square().sum()}
        )
        foreseen = 1.0 - spread["error"] / spread["return"] if spread["return"] > 0 else 0.0
        return {
            "reward": total["reward"] / max(total["sequences"], 1.0),
            "value": total["value"] / count,
            "return": mean,
            "explained_variance": foreseen,
        }
