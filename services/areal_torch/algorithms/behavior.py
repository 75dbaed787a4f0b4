"""Importance weights that correct for policy changes since a token was sampled, and their checks.

behavior: the policy that sampled, as its server computed it. proximal: the policy at the start of
the update. policy: the one under training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_torch.algorithms.normalization import sum_over_ranks
from areal_torch.algorithms.packing import sequence_index

MAX_LOG_RATIO = 20.0
"""e^20 = 4.9e8: far above any clip range or cap, far below what float32 and its squares hold."""
# Each halves a range of 401; after 61, its width is 2e-16.
_HALVINGS = 61


def masked_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Returns a - b, and 0 off the mask, whatever the values there are."""
    return torch.where(mask, a - b, 0.0)


@torch.no_grad()
def behavior_weight(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    cap: float | None,
    *,
    mode: str = "token_mask",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes w = exp(proximal - behavior), the importance weight of a token or a sequence.

    A sequence's weight is the product of its loss tokens' (as in verl and TRL; AReaL takes their
    geometric mean, which lies near 1 and corrects for little).

    Args:
        proximal_logprobs: float [T].
        behavior_logprobs: float [T].
        loss_mask: bool [T].
        cap: Largest weight; None: any.
        mode: `token_mask` and `sequence_mask` leave out what is above the cap, `token_truncate` and
            `sequence_truncate` give it the cap as weight.
        cu_seqlens: int [S+1]; used by the sequence modes, which need it.

    Returns:
        The weight, [T], at most e^20, 0 for what is left out and off the mask; and statistics:
        `behavior_weight` (of the tokens that are kept), `behavior_weight_max` (before the cap, of
        all loss tokens), `behavior_weight_capped_ratio` (tokens above the cap).
    """
    weight = masked_difference(proximal_logprobs, behavior_logprobs, loss_mask)
    if mode.startswith("sequence"):
        assert cu_seqlens is not None
        owner = sequence_index(cu_seqlens)
        weight = weight.new_zeros(len(cu_seqlens) - 1).index_add_(0, owner, weight)[owner]
    weight.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_().masked_fill_(~loss_mask, 0.0)
    largest = weight.amax() if len(weight) else weight.sum()
    capped = torch.zeros_like(loss_mask) if cap is None else weight > cap
    weight.masked_fill_(capped, cap if cap is not None and mode.endswith("truncate") else 0.0)
    stats = {
        "behavior_weight": weight.sum(),
        "behavior_weight_max": largest,
        "behavior_weight_capped_ratio": capped.sum(),
    }
    return weight, stats


@torch.no_grad()
def second_moment_mask(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    threshold: float,
    process_group: Any = None,
) -> Tensor:
    """Chooses the tokens that M2PO trains on (arXiv 2510.01161).

    With m = (policy - behavior)^2, tokens are left out from the largest m on, until the mean of
    the others is below the threshold. The choice is made over the batch of all ranks (AReaL makes
    it in each micro-batch: there it depends on how a batch is cut). Tokens with equal m are kept or
    left out together.

    Args:
        policy_logprobs: float [T], just before the optimizer step.
        behavior_logprobs: float [T].
        loss_mask: bool [T].
        threshold: Upper bound for the mean over the kept tokens.
        process_group: Data-parallel group, or None.

    Returns:
        Bool [T], false off the mask.
    """
    moments = masked_difference(policy_logprobs, behavior_logprobs, loss_mask).double()
    moments = moments.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).square_()
    ordered = moments[loss_mask].sort().values
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])

    def below(limit: Tensor) -> bool:
        """Whether the mean of all values that are at most `limit` is below the threshold."""
        count = torch.searchsorted(ordered, limit, right=True)
        total = torch.stack([sums[count], count.double()])
        total = sum_over_ranks(total, process_group)
        return bool(total[0] < threshold * total[1].clamp(min=1.0))

    # The mean of those up to a limit grows with the limit: the ranks search for it together.
    low, high = moments.new_zeros(()), moments.new_tensor(MAX_LOG_RATIO**2 + 1.0)
    if below(high):
        return loss_mask
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if below(middle):
            low = middle
        else:
            high = middle
    return loss_mask & (moments <= low)


def mismatch(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    token_versions: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    version: int,
) -> dict[str, Tensor]:
    """Compares the sampler's logprobs with the trainer's where both used the same weights.

    These are the sequences whose tokens were all sampled by `version`. In any other sequence the
    weights have changed since, or the keys and values of earlier tokens come from older weights.
    Its logprobs are expected to differ, and `behavior_weight` corrects for that.

    Args:
        policy_logprobs: Logprobs under the weights `version`, [T].
        behavior_logprobs: The server's, [T].
        token_versions: The sampler's versions, [T]; any number where not sampled.
        loss_mask: The sampled tokens, [T] bool.
        cu_seqlens: Bounds of the packed sequences, [n + 1].
        version: The trainer's, before the update.

    Returns:
        Sums over the tokens compared: `mismatch_kl` (of sampler || trainer, r - 1 - log r with
        r = trainer / sampler, in nats), `mismatch_tokens` (their number); and `mismatch_max`, the
        largest difference of two logprobs. All 0 where there is none to compare.
    """
    owner = sequence_index(cu_seqlens)
    stale = loss_mask & (token_versions != version)
    counts = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int64, device=loss_mask.device)
    counts.index_add_(0, owner, stale.long())
    compared = loss_mask & (counts == 0)[owner]
    with torch.no_grad():
        difference = masked_difference(policy_logprobs, behavior_logprobs, compared)
        difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        size = difference.abs()
        return {
            "mismatch_kl": (difference.exp() - 1.0 - difference).sum(),
            "mismatch_max": size.amax() if len(size) else size.sum(),
            "mismatch_tokens": compared.sum(),
        }


def loglinear_proximal_logprobs(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    token_versions: Tensor,
    loss_mask: Tensor,
    proximal_version: int,
) -> Tensor:
    """Approximates proximal logprobs between behavior and policy, without a forward pass (A-3PO).

    With v_b the version that sampled a token, v_p the version at the start of the update and v =
    v_p + 1 the version that the update makes: alpha = clip((v_p - v_b) / (v - v_b), 0, 1) and
    proximal = behavior + alpha (policy - behavior). A token sampled by v_p keeps its behavior
    logprob. This is the formula of AReaL's documentation with v = v_p + 1, so that the proximal
    policy is the weights at the start of the update; AReaL's trainer passes v = v_p, as if every
    token were one version younger.

    Returns:
        Float [T] without gradient, 0 where `loss_mask` is false.
    """
    age = (proximal_version - token_versions).clamp(min=0).to(policy_logprobs.dtype)
    alpha = age / (age + 1)
    policy = policy_logprobs.detach()
    return torch.where(loss_mask, behavior_logprobs + alpha * (policy - behavior_logprobs), 0.0).to(
        policy_logprobs.dtype
    )
