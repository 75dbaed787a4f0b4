"""Loss functions of tokens, and their sums, which the engine divides once.

A policy loss returns (loss of each token [T], statistics of each token [T]), or only the first.
`add_up` multiplies both by what a token counts for and adds them up. The engine divides the sums by
the global number of loss tokens of the step (all micro-batches, all ranks), so that neither
micro-batching nor data parallelism changes the result. Tokens that a loss leaves out (behavior
weight above its cap) still count in that number. A recipe's own loss has the same form
(`areal_torch.engines.formulas`); `areal.config.losses` lists the built-in ones.

Log ratios are clamped to +-20 before they are exponentiated, a sequence's mean after it was taken:
no logprob, however small, makes an infinite ratio or weight, and so no NaN where it meets an
advantage or weight of 0. The gradient is exact inside and 0 beyond, like that of verl's clamp.
(verl clamps GSPO's ratio of a sequence at 10 instead, from above only; AReaL clamps nothing.)

The proximal policy is the one in the denominator of a ratio.

Sums of statistics are float scalars without gradient, which the engine divides by the same number;
a name that ends in `_max` is combined by maximum instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from areal_torch.algorithms.behavior import MAX_LOG_RATIO, masked_difference
from areal_torch.algorithms.packing import sequence_index

LossResult = tuple[Tensor, dict[str, Tensor]]
"""Sums over loss tokens: the loss, with gradient, and statistics."""
TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""The same for each token, [T]."""


def add_up(
    losses: Tensor, stats: Mapping[str, Tensor], loss_mask: Tensor, weight: Tensor | None = None
) -> LossResult:
    """Returns the sums over loss tokens.

    Args:
        losses: float [T], with gradient; off the mask anything, even NaN.
        stats: bool or float [T] each; the same.
        loss_mask: bool [T].
        weight: float [T], what a token counts for in the loss, 0 off the mask; None: 1.
    """
    counts = (loss_mask if weight is None else weight).to(losses.dtype)
    total = torch.dot(torch.where(loss_mask, losses, 0.0), counts)
    with torch.no_grad():
        sums = {}
        for name, value in stats.items():
            if name.endswith("_max"):
                lowest = value.new_full((1,), -torch.inf, dtype=losses.dtype)
                sums[name] = torch.cat([value[loss_mask].to(losses.dtype), lowest]).amax()
            else:
                sums[name] = torch.where(loss_mask, value, 0.0).sum()
    return total, sums


def _sequence_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Replaces each token's value by the mean over its sequence's masked tokens."""
    owner = sequence_index(cu_seqlens)
    zeros = values.new_zeros(len(cu_seqlens) - 1)
    totals = zeros.index_add(0, owner, torch.where(mask, values, 0.0))
    counts = zeros.index_add(0, owner, mask.to(values.dtype)).clamp(min=1)
    return (totals / counts)[owner]


class _WithGradient(torch.autograd.Function):
    """A value whose gradient is known: two passes instead of autograd's one per operation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, gradient: Tensor, factor: Tensor | None
    ) -> Tensor:
        """Returns `value`; its derivative by `x` is `gradient` times `factor`."""
        del x
        ctx.save_for_backward(gradient, factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, factor = ctx.saved_tensors
        product = outer[0] * gradient
        return (product if factor is None else product * factor), None, None, None


def with_gradient(
    x: Tensor, value: Tensor, gradient: Tensor, factor: Tensor | None = None
) -> Tensor:
    """Returns `value`, a scalar or of x's shape, with a given derivative with respect to `x`.

    The derivative is `gradient`, times `factor` if there is one. The two are multiplied in this
    order, after the derivative that arrives: as autograd would for `-advantage * exp(x)`, to the
    last bit.
    """
    result: Tensor = _WithGradient.apply(x, value, gradient, factor)  # type: ignore[no-untyped-call]
    return result


def token_weights(
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    aggregation: str,
    *,
    tokens: float,
    sequences: float,
    max_tokens: int,
) -> Tensor:
    """Returns weights of tokens that turn the engine's mean over tokens into another mean.

    `sequence_mean`: the mean of the sequences' means. `constant`: the mean of the sequences' sums,
    each divided by `max_tokens` (Dr. GRPO). Sequences without loss tokens do not count.

    Args:
        loss_mask: bool [T].
        cu_seqlens: int [S+1].
        aggregation: `sequence_mean` or `constant`.
        tokens: Loss tokens of all ranks' shares of the minibatch: the engine's divisor.
        sequences: Sequences with loss tokens of all ranks' shares.
        max_tokens: The constant.

    Returns:
        Float64 [T], 0 off the mask.
    """
    owner = sequence_index(cu_seqlens)
    lengths = torch.zeros(len(cu_seqlens) - 1, dtype=torch.float64, device=loss_mask.device)
    lengths.index_add_(0, owner, loss_mask.double())
    divisor = lengths[owner] if aggregation == "sequence_mean" else lengths.new_tensor(max_tokens)
    return torch.where(loss_mask, tokens / (max(sequences, 1.0) * divisor), 0.0)


def ppo_actor_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> TokenLosses:
    """PPO's clipped surrogate; decoupled (AReaL, arXiv 2505.24298, equation 5) with a weight.

    With ppo_ratio r = exp(policy - proximal) and advantage A:

        l = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_higher))    clipped surrogate
        l = min(l, c_clip |A|) where A < 0                              dual clip (arXiv 1912.09729)

    Decoupled PPO (Hilton et al., arXiv 2110.00641) has the proximal policy in the denominator, and
    `add_up` weights each token by `behavior_weight`; plain PPO has the sampler there and no weight.

    Statistics: `ppo_ratio` (r), `clip_ratio`, `dual_clip_ratio`, `approx_kl` (k3 of r,
    r - 1 - log r; AReaL's is k1).

    Args:
        policy_logprobs: float [T], with gradient.
        proximal_logprobs: float [T].
        advantages: float [T].
        loss_mask: bool [T].
        eps_clip: Lower (and default upper) clip range.
        eps_clip_higher: Upper clip range.
        c_clip: Dual clip, > 1; None: off.

    Returns:
        Loss of each token, [T], and statistics.
    """
    with torch.no_grad():
        log_ratio = masked_difference(policy_logprobs, proximal_logprobs, loss_mask)
        advantages = advantages.masked_fill(~loss_mask, 0.0)
    return _clipped(
        policy_logprobs, log_ratio, advantages, loss_mask, eps_clip, eps_clip_higher, c_clip
    )


def gspo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> TokenLosses:
    """GSPO (arXiv 2507.18071): PPO with one ratio for all tokens of a sequence.

    r is the exponential of the sequence's mean log ratio, A its mean advantage, both over all its
    loss tokens; a token's weight stays its own. The papers do not say how a cap acts there: a token
    above it is left out of the sum, but stays in its sequence's means (AReaL takes it out of the
    means too). The gradient is the exact derivative (verl's token weights use a straight-through
    one).

    Args:
        cu_seqlens: int [S+1]. The other arguments and the result are those of `ppo_actor_loss`.
    """
    log_ratio = masked_difference(policy_logprobs, proximal_logprobs, loss_mask)
    # Each token moves the mean that all tokens of its sequence share.
    means = _sequence_means(log_ratio, loss_mask, cu_seqlens)
    advantages = advantages.masked_fill(~loss_mask, 0.0)
    advantages = _sequence_means(advantages, loss_mask, cu_seqlens)
    return _clipped(
        means, means.detach().clone(), advantages, loss_mask, eps_clip, eps_clip_higher, c_clip
    )


def _clipped(
    x: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
) -> TokenLosses:
    """Computes `ppo_actor_loss` for a log ratio without gradient that is `x` plus a constant."""
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    with torch.no_grad():
        beyond = log_ratio.abs() > MAX_LOG_RATIO
        ratio = log_ratio.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        unclipped = (ratio * advantages).neg_()
        clipped = ratio.clamp(1.0 - eps_clip, 1.0 + higher).mul_(advantages).neg_()
        is_clipped = clipped > unclipped
        loss = torch.maximum(unclipped, clipped)
        # d(-A r) / d(log r) is -A r again; it vanishes where the ratio or its log is clipped.
        flat = is_clipped | beyond
        stats = {"ppo_ratio": ratio, "clip_ratio": is_clipped}
        if c_clip is not None:
            bound = advantages.abs().mul_(c_clip)
            is_dual_clipped = (advantages < 0).logical_and_(loss > bound)
            loss = torch.where(is_dual_clipped, bound, loss)
            flat |= is_dual_clipped
            stats["dual_clip_ratio"] = is_dual_clipped
        slope = advantages.neg().masked_fill_(flat, 0.0)
        stats["approx_kl"] = torch.expm1(log_ratio).sub_(log_ratio)
    return with_gradient(x, loss, slope, ratio), stats


def cispo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
) -> TokenLosses:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(r)) A log policy.

    Unlike PPO's, clipped tokens keep their gradient.
    Arguments and the result are those of `ppo_actor_loss`.
    """
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    with torch.no_grad():
        _, ratio, stats = _ratios(policy_logprobs, proximal_logprobs, loss_mask)
        clipped = ratio.clamp(1.0 - eps_clip, 1.0 + higher)
        stats["clip_ratio"] = clipped != ratio
        slope = -clipped * advantages.masked_fill(~loss_mask, 0.0)
        loss = slope * policy_logprobs.masked_fill(slope == 0, 0.0)
    return with_gradient(policy_logprobs, loss, slope), stats


def sapo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLosses:
    """SAPO (arXiv 2511.20347): a soft gate instead of the clip.

        l = -A (4 / tau) sigmoid(tau (r - 1))

    with tau_positive where A > 0, and elsewhere tau_negative, which closes faster. At r = 1 its
    slope is that of the ratio. AReaL refuses it with decoupled PPO; with a weight it is as valid as
    PPO. The other arguments and the result are those of `ppo_actor_loss`; nothing is clipped.
    """
    with torch.no_grad():
        log_ratio, ratio, stats = _ratios(policy_logprobs, proximal_logprobs, loss_mask)
        advantages = advantages.masked_fill(~loss_mask, 0.0)
        tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
        gate = torch.sigmoid(tau * (ratio - 1.0))
        loss = -advantages * gate * (4.0 / tau)
        slope = 4.0 * -advantages * gate * (1.0 - gate) * ratio
        slope.masked_fill_(log_ratio.abs() >= MAX_LOG_RATIO, 0.0)
    return with_gradient(policy_logprobs, loss, slope), stats


def _ratios(
    policy_logprobs: Tensor, proximal_logprobs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns clamped log ratios, ratios, and their statistics."""
    log_ratio = masked_difference(policy_logprobs, proximal_logprobs, loss_mask)
    ratio = log_ratio.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    stats = {"ppo_ratio": ratio, "approx_kl": torch.expm1(log_ratio).sub_(log_ratio)}
    return log_ratio, ratio, stats


def sft_loss(policy_logprobs: Tensor, loss_mask: Tensor) -> LossResult:
    """Negative log-likelihood of the tokens with `loss_mask`."""
    return -torch.where(loss_mask, policy_logprobs, 0.0).sum(), {}


def value_loss(
    values: Tensor,
    center_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float,
) -> LossResult:
    """A critic's clipped loss: max((v - R)^2, (clip(v, center - eps, center + eps) - R)^2) / 2.

    Args:
        values: float [T], of the state before each token, with gradient.
        center_values: float [T], those at the start of the update.
        returns: float [T].
        loss_mask: bool [T].
        eps_clip: Beyond this distance from the center a value has no gradient towards the return.

    Returns:
        The sum over tokens with `loss_mask`; statistic `clip_ratio`.
    """
    zeros = values.new_zeros(())
    change = torch.where(loss_mask, values - center_values, zeros).clamp(-eps_clip, eps_clip)
    target = torch.where(loss_mask, returns, zeros).to(values.dtype)
    plain = (torch.where(loss_mask, values, zeros) - target).square()
    clipped = (torch.where(loss_mask, center_values, zeros) + change - target).square()
    stats = {"clip_ratio": (clipped > plain).sum()}
    return torch.maximum(plain, clipped).sum() / 2, stats
