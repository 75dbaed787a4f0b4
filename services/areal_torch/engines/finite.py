"""Finds the first value of a training step, from rewards to gradient, that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areal_torch.algorithms.packing import Batch, sequence_index

# In the order in which one makes the next: the first that is not finite is the cause.
_INPUTS = (
    "rewards", "behavior_logprobs", "reference_logprobs", "values", "bootstrap_values",
    "proximal_logprobs", "advantages", "returns",
)  # fmt: skip


def find_cause(batch: Batch, bad_logprobs: int, loss: float) -> dict[str, Any]:
    """Finds what is not finite in this rank's batch.

    Args:
        batch: The optimizer step's batch.
        bad_logprobs: Loss tokens whose logprob under the policy was not finite.
        loss: Its sum on this rank.

    Returns:
        JSON: `cause` (words; empty where everything is finite) and `groups` (values of
        `group_index`: those with an input that is not finite).
    """
    owner = sequence_index(batch["cu_seqlens"])
    groups: set[int] = set()
    cause = ""
    for name in _INPUTS:
        if name not in batch:
            continue
        bad = ~torch.isfinite(batch[name])
        read = torch.ones_like(bad)
        if name not in ("rewards", "bootstrap_values"):
            read = batch["loss_mask"]  # off it, these are never looked at
        bad &= read
        places = torch.nonzero(bad).flatten()
        if len(places):
            sequences = places if name == "bootstrap_values" else owner[places]
            groups |= set(batch["group_index"][sequences].tolist())
            cause = cause or f"{name} are not finite ({len(places)} of {int(read.sum())})"
    if not cause and bad_logprobs:
        tokens = int(batch["loss_mask"].sum())
        cause = f"the policy's logprobs are not finite ({bad_logprobs} of {tokens})"
    if not cause and not math.isfinite(loss):
        cause = f"the loss is {loss}, but its inputs and logprobs are finite"
    return {"cause": cause, "groups": sorted(groups)}


def name_cause(found: Sequence[Mapping[str, Any]], grad_norm: float) -> str:
    """Returns one line that sums up the results of `find_cause` on all ranks."""
    causes = [f"rank {rank}: {each['cause']}" for rank, each in enumerate(found) if each["cause"]]
    return "; ".join(causes) or (
        f"the gradient norm is {grad_norm}, while losses, logprobs and inputs are finite on all "
        f"{len(found)} ranks"
    )
