"""Loss functions: sums over tokens, divided once by the engine.

Each loss returns (sum over its tokens, statistics). The engine divides by the global number of loss
tokens of the step (all micro-batches, all ranks), so that neither micro-batching nor data
parallelism changes the result. Tokens that a loss leaves out (behavior weight above its cap) still
count in that number.

Log ratios are clamped to +-20 before they are exponentiated, a sequence's mean after it was taken:
no logprob, however small, makes an infinite ratio or weight, and so no NaN where it meets an
advantage or weight of 0. The gradient is exact inside and 0 beyond, like that of verl's clamp.
(verl clamps GSPO's ratio of a sequence at 10 instead, from above only; AReaL clamps nothing.)

Statistics are float scalars without gradient: sums over loss tokens, which the engine divides by
the same number; a name that ends in `_max` is combined by maximum instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.algorithms.packing import sequence_index
from areal.errors import InvalidInput

LossResult = tuple[Tensor, dict[str, Tensor]]

MAX_LOG_RATIO = 20.0
"""e^20 = 4.9e8: far above any clip range or cap, far below what float32 and its squares hold."""


def _masked_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, a - b, 0.0)


def _sequence_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Replace each token's value by the mean over its sequence's masked tokens."""
    owner = sequence_index(cu_seqlens)
    zeros = values.new_zeros(len(cu_seqlens) - 1)
    totals = zeros.index_add(0, owner, torch.where(mask, values, 0.0))
    counts = zeros.index_add(0, owner, mask.to(values.dtype)).clamp(min=1)
    return (totals / counts)[owner]


class _WithGradient(torch.autograd.Function):
    """A value whose gradient is known: two passes instead of autograd's one per operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        """Return `value`; its derivative by `x` is `gradient`."""
        del x
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None


def _with_gradient(x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    result: Tensor = _WithGradient.apply(x, value, gradient)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def behavior_weight(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, cap: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute w = exp(proximal - behavior).

    Args:
        proximal_logprobs: float [T].
        behavior_logprobs: float [T].
        loss_mask: bool [T].
        cap: largest weight; None: any.

    Returns:
        The weight, [T], at most e^20, 0 for tokens above the cap and off the mask; and statistics:
        `behavior_weight` (of the tokens that are kept), `behavior_weight_max` (of all loss tokens),
        `behavior_weight_capped_ratio` (tokens above the cap).
    """
    weight = _masked_difference(proximal_logprobs, behavior_logprobs, loss_mask)
    weight.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_().masked_fill_(~loss_mask, 0.0)
    largest = weight.amax() if len(weight) else weight.sum()
    capped = torch.zeros_like(loss_mask) if cap is None else weight > cap
    weight.masked_fill_(capped, 0.0)
    stats = {
        "behavior_weight": weight.sum(),
        "behavior_weight_max": largest,
        "behavior_weight_capped_ratio": capped.sum(),
    }
    return weight, stats


def mismatch(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    token_versions: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    version: int,
) -> dict[str, Tensor]:
    """Compare the sampler's logprobs with the trainer's where the same weights gave both.

    That is in sequences of which `version` sampled every token. In any other one the weights have
    changed since, or the keys and values of earlier tokens come from older weights: its logprobs
    differ rightly, and `behavior_weight` corrects for it.

    Args:
        policy_logprobs: of the weights `version`, [T].
        behavior_logprobs: the server's, [T].
        token_versions: of the sampler, [T]; any number where not sampled.
        loss_mask: the sampled tokens, [T] bool.
        cu_seqlens: of the packed sequences, [n + 1].
        version: the trainer's, before the update.

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
        difference = _masked_difference(policy_logprobs, behavior_logprobs, compared)
        difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        size = difference.abs()
        return {
            "mismatch_kl": (difference.exp() - 1.0 - difference).sum(),
            "mismatch_max": size.amax() if len(size) else size.sum(),
            "mismatch_tokens": compared.sum(),
        }


def ppo_actor_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    decoupled: bool = True,
    behavior_weight_cap: float | None = None,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
) -> LossResult:
    """Decoupled PPO (AReaL, arXiv 2505.24298, equation 5; Hilton et al., arXiv 2110.00641).

    With ppo_ratio r = exp(policy - proximal), behavior weight w = exp(proximal - behavior),
    advantage A:

        l = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_higher))    clipped surrogate
        l = min(l, c_clip |A|) where A < 0                              dual clip (arXiv 1912.09729)
        loss = sum of w l over loss tokens with w <= behavior_weight_cap

    `decoupled=True` multiplies by w whether or not a cap is set. `decoupled=False` is plain PPO
    around whatever is given as `behavior_logprobs`: r = exp(policy - behavior), no weight.

    The sequence level is GSPO (arXiv 2507.18071): r is the exponential of the sequence's mean log
    ratio, A its mean advantage, both over all its loss tokens; w stays each token's own. The papers
    do not say how a cap acts there: a token above it is left out of the sum, but stays in its
    sequence's means (AReaL takes it out of the means too). The gradient is the exact derivative of
    this sum (verl's token weights use a straight-through one). As in AReaL, a sequence counts by
    its loss tokens, where the paper's mean over sequences counts each once.

    Statistics: `ppo_ratio` (r), `clip_ratio`, `dual_clip_ratio`, `approx_kl` (k3 of r,
    r - 1 - log r; AReaL's is k1), and those of `behavior_weight`.

    Args:
        policy_logprobs: float [T], with gradient.
        proximal_logprobs: float [T].
        behavior_logprobs: float [T].
        advantages: float [T].
        loss_mask: bool [T].
        eps_clip: lower (and default upper) clip range.
        eps_clip_higher: upper clip range.
        c_clip: dual clip, > 1; None: off.
        decoupled: see above.
        behavior_weight_cap: tokens with a larger w are dropped; None: none.
        importance_sampling_level: `token`, or `sequence` (GSPO, see above).
        cu_seqlens: int [S+1], for the sequence level.

    Returns:
        Loss sum and statistics.

    Raises:
        InvalidInput: unknown level, or the sequence level without cu_seqlens.
    """
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    with torch.no_grad():
        center = proximal_logprobs if decoupled else behavior_logprobs
        log_ratio = _masked_difference(policy_logprobs, center, loss_mask)
        advantages = advantages.masked_fill(~loss_mask, 0.0)
        if importance_sampling_level == "sequence":
            if cu_seqlens is None:
                raise InvalidInput("cu_seqlens=None: expected a tensor at the sequence level")
            log_ratio = _sequence_means(log_ratio, loss_mask, cu_seqlens)
            advantages = _sequence_means(advantages, loss_mask, cu_seqlens)
        elif importance_sampling_level != "token":
            raise InvalidInput(
                f"importance_sampling_level={importance_sampling_level!r}: "
                "expected 'token' or 'sequence'"
            )
        beyond = log_ratio.abs() > MAX_LOG_RATIO
        ratio = log_ratio.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        unclipped = (ratio * advantages).neg_()
        clipped = ratio.clamp(1.0 - eps_clip, 1.0 + higher).mul_(advantages).neg_()
        is_clipped = clipped > unclipped
        loss = torch.maximum(unclipped, clipped)
        # d(-A r) / d(log r) is -A r again; it vanishes where the ratio or its log is clipped.
        slope = unclipped.masked_fill_(is_clipped | beyond, 0.0)
        stats = {
            "ppo_ratio": torch.dot(ratio, loss_mask.to(ratio.dtype)),
            "clip_ratio": (is_clipped & loss_mask).sum(),
        }
        if c_clip is not None:
            bound = advantages.abs().mul_(c_clip)
            is_dual_clipped = (advantages < 0).logical_and_(loss > bound)
            loss = torch.where(is_dual_clipped, bound, loss)
            slope.masked_fill_(is_dual_clipped, 0.0)
            stats["dual_clip_ratio"] = (is_dual_clipped & loss_mask).sum()
        if decoupled:
            weight, weight_stats = behavior_weight(
                proximal_logprobs, behavior_logprobs, loss_mask, behavior_weight_cap
            )
            stats |= weight_stats
        else:
            weight = loss_mask.to(loss.dtype)
        loss_sum = torch.dot(loss, weight.to(loss.dtype))
        slope.mul_(weight)
        if importance_sampling_level == "sequence" and cu_seqlens is not None:
            # Each token moves the mean that all tokens of its sequence share.
            slope = _sequence_means(slope, loss_mask, cu_seqlens) * loss_mask
        log_ratio.masked_fill_(~loss_mask, 0.0)
        stats["approx_kl"] = torch.expm1(log_ratio).sub_(log_ratio).sum()
    return _with_gradient(policy_logprobs, loss_sum, slope), stats


def cispo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    decoupled: bool = True,
    behavior_weight_cap: float | None = None,
) -> LossResult:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(r)) A log policy.

    Unlike PPO's, clipped tokens keep their gradient.
    Arguments, the behavior weight and the result are those of `ppo_actor_loss`.
    """
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    with torch.no_grad():
        center = proximal_logprobs if decoupled else behavior_logprobs
        log_ratio = _masked_difference(policy_logprobs, center, loss_mask)
        ratio = log_ratio.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1.0 - eps_clip, 1.0 + higher)
        stats = {
            "ppo_ratio": torch.dot(ratio, loss_mask.to(ratio.dtype)),
            "approx_kl": torch.expm1(log_ratio).sub_(log_ratio).sum(),
            "clip_ratio": ((clipped != ratio) & loss_mask).sum(),
        }
        weight = loss_mask
        if decoupled:
            weight, weight_stats = behavior_weight(
                proximal_logprobs, behavior_logprobs, loss_mask, behavior_weight_cap
            )
            stats |= weight_stats
        slope = -clipped * weight * advantages.masked_fill(~loss_mask, 0.0)
        loss_sum = (slope * policy_logprobs.masked_fill(slope == 0, 0.0)).sum()
    return _with_gradient(policy_logprobs, loss_sum, slope), stats


def loglinear_proximal_logprobs(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    token_versions: Tensor,
    loss_mask: Tensor,
    proximal_version: int,
) -> Tensor:
    """Approximate proximal logprobs between behavior and policy, without a forward pass (A-3PO).

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


def sft_loss(policy_logprobs: Tensor, loss_mask: Tensor) -> LossResult:
    """Negative log-likelihood of the tokens with `loss_mask`."""
    return -torch.where(loss_mask, policy_logprobs, 0.0).sum(), {}
