"""Normalization of rewards by group and of advantages by batch: float64, across ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.config.training import AdvantageNorm, RewardNorm

# Added to a standard deviation, as in AReaL: none of rewards that differ is near it.
_EPS = 1e-5


def sum_over_ranks(values: Tensor, process_group: Any) -> Tensor:
    """Sums a CPU tensor over the ranks of a group, in place; with None, over this process alone."""
    if process_group is not None:
        dist.all_reduce(values, group=process_group)
    return values


def masked_mean_std(
    values: Tensor, mask: Tensor, process_group: Any = None
) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of the masked values on all ranks.

    Args:
        values: Any shape.
        mask: bool, the shape of `values`.
        process_group: torch.distributed group to sum over; None: this process alone.

    Returns:
        Two float64 scalars; both 0 for an empty mask, std 0 for a single value.
    """
    chosen = values[mask].double()
    totals = torch.stack([chosen.sum(), chosen.new_tensor(float(chosen.numel()))])
    total, count = sum_over_ranks(totals, process_group).unbind()
    mean = total / count.clamp(min=1)
    # Two passes: E[x^2] - E[x]^2 cancels when the mean is large.
    squares = sum_over_ranks((chosen - mean).square().sum(), process_group)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return mean, std


def normalize_tokens(
    values: Tensor, mask: Tensor, norm: AdvantageNorm, process_group: Any = None
) -> Tensor:
    """Normalizes token values over the whole batch: (x - mean) / (std + eps) on `mask`, else 0.

    Args:
        values: float [T].
        mask: bool [T].
        norm: MEAN/STD.
        process_group: Data-parallel group, or None.

    Returns:
        A tensor of the shape and dtype of `values`.
    """
    center, scale = norm.split("/")
    mean, std = masked_mean_std(values, mask, process_group)
    result = values.double()
    if center == "batch":
        result = result - mean
    if scale == "batch":
        result = result / (std + _EPS)
    return torch.where(mask, result, 0.0).to(values.dtype)


def center_and_scale(
    scores: Tensor, group_index: Tensor, norm: RewardNorm, process_group: Any = None
) -> tuple[Tensor, Tensor]:
    """Finds the center and the scale of each sequence's score: (score - center) / scale.

    Groups have their actual sizes: a group that lost members to rejection is normalized over the
    rest. The center of a group of one that is left out of its own mean is its score. The standard
    deviation is that of the raw scores around their own mean, whatever is subtracted (AReaL takes
    it around the center instead: a root mean square without one, larger with leave-one-out).

    A group of one and a group of equal scores say nothing about their spread: their standard
    deviation counts as 1 (verl's GRPO does the same for a group of one). With the group's mean as
    center the result is 0 either way; with another, dividing by 1e-5 alone would make that group
    1e5 times larger than all others.

    Args:
        scores: float [S].
        group_index: int64 [S]; any integers, groups need not be contiguous.
        norm: MEAN/STD.
        process_group: Data-parallel group for `batch` levels, or None. Groups never span ranks.

    Returns:
        Center and scale (> 0, 1e-5 included), float64 [S] each.
    """
    x = scores.double()
    _, group = torch.unique(group_index, return_inverse=True)
    count = torch.bincount(group).double()
    group_sum = torch.zeros_like(count).index_add_(0, group, x)
    group_mean = group_sum / count
    batch_mean = batch_std = x.new_zeros(())
    mean_level, std_level = norm.split("/")
    if "batch" in (mean_level, std_level):
        everything = torch.ones_like(x, dtype=torch.bool)
        batch_mean, batch_std = masked_mean_std(x, everything, process_group)
    if mean_level == "batch":
        center = batch_mean.expand_as(x)
    elif mean_level == "leave1out":
        others = (group_sum[group] - x) / (count[group] - 1).clamp(min=1)
        center = torch.where(count[group] > 1, others, x)
    elif mean_level == "group":
        center = group_mean[group]
    else:
        center = torch.zeros_like(x)
    if std_level == "batch":
        return center, (batch_std + _EPS).expand_as(x)
    if std_level == "group":
        squares = torch.zeros_like(count).index_add_(0, group, (x - group_mean[group]).square())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        # Not std == 0: the mean of equal scores need not be that score to the last bit.
        largest = torch.zeros_like(count).scatter_reduce_(0, group, x, "amax", include_self=False)
        smallest = torch.zeros_like(count).scatter_reduce_(0, group, x, "amin", include_self=False)
        return center, torch.where(largest > smallest, std + _EPS, 1.0)[group]
    return center, torch.ones_like(x)
