"""Normalization of rewards by group and of advantages by batch: float64, across ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.config_train import NormConfig


def _sum_over_ranks(values: Tensor, process_group: Any) -> Tensor:
    if process_group is not None:
        dist.all_reduce(values, group=process_group)
    return values


def masked_mean_std(
    values: Tensor, mask: Tensor, *, unbiased: bool = True, process_group: Any = None
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the masked values of all ranks.

    Args:
        values: any shape.
        mask: bool, the shape of `values`.
        unbiased: divide squares by n - 1.
        process_group: torch.distributed group to sum over; None: this process alone.

    Returns:
        Two float64 scalars; both 0 for an empty mask, std 0 for a single value.
    """
    chosen = values[mask].double()
    totals = torch.stack([chosen.sum(), chosen.new_tensor(float(chosen.numel()))])
    total, count = _sum_over_ranks(totals, process_group).unbind()
    mean = total / count.clamp(min=1)
    # Two passes: E[x^2] - E[x]^2 cancels when the mean is large.
    squares = _sum_over_ranks((chosen - mean).square().sum(), process_group)
    std = (squares / (count - int(unbiased)).clamp(min=1)).sqrt()
    return mean, std


def normalize_tokens(
    values: Tensor, mask: Tensor, config: NormConfig, process_group: Any = None
) -> Tensor:
    """Normalize token values over the whole batch: (x - mean) / (std + eps) on `mask`, 0 elsewhere.

    Args:
        values: float [T].
        mask: bool [T].
        config: levels `batch` or None.
        process_group: data-parallel group, or None.

    Returns:
        A tensor of the shape and dtype of `values`.
    """
    mean, std = masked_mean_std(
        values, mask, unbiased=config.std_unbiased, process_group=process_group
    )
    result = values.double()
    if config.mean_level is not None:
        result = result - mean
    if config.std_level is not None:
        result = result / (std + config.eps)
    return torch.where(mask, result, 0.0).to(values.dtype)


def normalize_scores(
    scores: Tensor, group_index: Tensor, config: NormConfig, process_group: Any = None
) -> Tensor:
    """Normalize one score per sequence, by group or by batch.

    Groups have their actual sizes: a group that lost members to rejection is normalized over the
    rest. A group of one has std 0, so that its result is 0 with `mean_level="group"`, also when it
    is left out of its own mean.

    Args:
        scores: float [S].
        group_index: int64 [S]; any integers, groups need not be contiguous.
        config: mean and std levels.
        process_group: data-parallel group for `batch` levels, or None. Groups never span ranks.

    Returns:
        Float64 [S].
    """
    x = scores.double()
    _, group = torch.unique(group_index, return_inverse=True)
    count = torch.bincount(group).double()
    group_sum = torch.zeros_like(count).index_add_(0, group, x)
    group_mean = group_sum / count
    batch_mean = batch_std = x.new_zeros(())
    if "batch" in (config.mean_level, config.std_level):
        everything = torch.ones_like(x, dtype=torch.bool)
        batch_mean, batch_std = masked_mean_std(
            x, everything, unbiased=config.std_unbiased, process_group=process_group
        )
    if config.mean_level == "batch":
        centered = x - batch_mean
    elif config.mean_level == "group" and config.mean_leave1out:
        others = (group_sum[group] - x) / (count[group] - 1).clamp(min=1)
        centered = torch.where(count[group] > 1, x - others, 0.0)
    elif config.mean_level == "group":
        centered = x - group_mean[group]
    else:
        centered = x
    if config.std_level == "batch":
        return centered / (batch_std + config.eps)
    if config.std_level == "group":
        squares = torch.zeros_like(count).index_add_(0, group, (x - group_mean[group]).square())
        std = (squares / (count - int(config.std_unbiased)).clamp(min=1)).sqrt()
        return centered / (std[group] + config.eps)
    return centered
