"""Loss functions: sums over tokens, divided once by the engine.

Each loss returns (sum over its tokens, statistics). The engine divides by the global number of loss
tokens of the step (all micro-batches, all ranks), so that neither micro-batching nor data
parallelism changes the result. Tokens that a loss leaves out (behavior weight above its cap) still
count in that number.

Statistics are float scalars without gradient: sums over loss tokens, which the engine divides by
the same number; a name that ends in `_max` is combined by maximum instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithms.packing import sequence_index
from areal.errors import InvalidInput

LossResult = tuple[Tensor, dict[str, Tensor]]


def _masked_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, a - b, 0.0)


def _sequence_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Replace each token's value by the mean over its sequence's masked tokens."""
    owner = sequence_index(cu_seqlens)
    zeros = values.new_zeros(len(cu_seqlens) - 1)
    totals = zeros.index_add(0, owner, torch.where(mask, values, 0.0))
    counts = zeros.index_add(0, owner, mask.to(values.dtype)).clamp(min=1)
    return (totals / counts)[owner]


def behavior_weight(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return w = exp(proximal - behavior) without gradient, and the loss tokens with w <= cap."""
    weight = _masked_difference(proximal_logprobs, behavior_logprobs, loss_mask).detach().exp()
    kept = loss_mask if cap is None else loss_mask & (weight <= cap)
    return weight, kept


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
    around the behavior
    policy: r = exp(policy - behavior), no weight.

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
        importance_sampling_level: `token`, or `sequence` (GSPO, arXiv 2507.18071: r is the
            exponential of the sequence's mean log ratio, A its mean advantage).
        cu_seqlens: int [S+1], for the sequence level.

    Returns:
        Loss sum and statistics.

    Raises:
        InvalidInput: unknown level, or the sequence level without cu_seqlens.
    """
    center = proximal_logprobs if decoupled else behavior_logprobs
    log_ratio = _masked_difference(policy_logprobs, center.detach(), loss_mask)
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
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped.detach() > unclipped.detach()
    is_dual_clipped = torch.zeros_like(is_clipped)
    if c_clip is not None:
        bound = c_clip * advantages.abs()
        is_dual_clipped = (advantages < 0) & (loss.detach() > bound)
        loss = torch.where(is_dual_clipped, bound, loss)
    kept, weight_stats = loss_mask, {}
    if decoupled:
        weight, kept = behavior_weight(
            proximal_logprobs, behavior_logprobs, loss_mask, behavior_weight_cap
        )
        loss = loss * torch.where(kept, weight, 0.0)
        weight_stats = {
            "behavior_weight": (weight * loss_mask).sum(),
            "behavior_weight_max": (weight * loss_mask).amax() if len(weight) else weight.sum(),
            "behavior_weight_capped_ratio": (loss_mask & ~kept).sum(),
        }
    loss_sum = torch.where(kept, loss, 0.0).sum()
    detached = log_ratio.detach()
    stats = {
        "ppo_ratio": (ratio.detach() * loss_mask).sum(),
        "approx_kl": (torch.expm1(detached) - detached).sum(),
        "clip_ratio": (is_clipped & loss_mask).sum(),
        "dual_clip_ratio": (is_dual_clipped & loss_mask).sum(),
        **weight_stats,
    }
    return loss_sum, stats


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
    center = proximal_logprobs if decoupled else behavior_logprobs
    log_ratio = _masked_difference(policy_logprobs, center, loss_mask).detach()
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    factor, kept, weight_stats = clipped, loss_mask, {}
    if decoupled:
        weight, kept = behavior_weight(
            proximal_logprobs, behavior_logprobs, loss_mask, behavior_weight_cap
        )
        factor = clipped * weight
        weight_stats = {
            "behavior_weight": (weight * loss_mask).sum(),
            "behavior_weight_max": (weight * loss_mask).amax() if len(weight) else weight.sum(),
            "behavior_weight_capped_ratio": (loss_mask & ~kept).sum(),
        }
    loss_sum = torch.where(kept, -factor * advantages * policy_logprobs, 0.0).sum()
    stats = {
        "ppo_ratio": (ratio * loss_mask).sum(),
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "clip_ratio": ((clipped != ratio) & loss_mask).sum(),
        **weight_stats,
    }
    return loss_sum, stats


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
    logprob.

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


def critic_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
) -> LossResult:
    """Clipped value loss.

    Half the larger of two squared errors: that of the new value and that of the new value clipped.

    Args:
        new_values: float [T], with gradient.
        values: float [T], those at the start of the update.
        returns: float [T].
        loss_mask: bool [T].
        eps_clip: the value is clipped to values +- eps_clip.
    """
    clipped_values = values + (new_values - values).clamp(-eps_clip, eps_clip)
    unclipped = (new_values - returns).square()
    clipped = (clipped_values - returns).square()
    loss = 0.5 * torch.where(loss_mask, torch.maximum(unclipped, clipped), 0.0)
    stats = {"value_clip_ratio": ((clipped > unclipped) & loss_mask).sum()}
    return loss.sum(), stats
