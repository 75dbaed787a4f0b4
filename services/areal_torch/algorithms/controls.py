"""Controls: training signals that must not teach anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_torch.algorithms.packing import Batch


def shuffle_rewards(batch: Batch, seed: int) -> None:
    """Shuffles the rewards of a batch among its sequences, for a control experiment.

    The rewards keep their distribution but lose their meaning. If held-out accuracy still rises,
    the policy was not learning from the rewards.

    Args:
        batch: A packed batch. Its `rewards` are replaced; each sequence's new reward is entirely on
            the last sampled token.
        seed: Random seed of the permutation; use a different one at each step.
    """
    import torch

    from areal_torch.algorithms.advantages import place_scores, sequence_sums

    cu_seqlens = batch["cu_seqlens"]
    outcomes = sequence_sums(batch["rewards"], cu_seqlens)
    generator = torch.Generator().manual_seed(seed)
    dealt = outcomes[torch.randperm(len(outcomes), generator=generator)]
    nothing = torch.zeros_like(batch["rewards"])
    mask, slopes = batch["loss_mask"], torch.ones_like(dealt)
    batch["rewards"] = place_scores(nothing, mask, cu_seqlens, dealt, slopes).float()
