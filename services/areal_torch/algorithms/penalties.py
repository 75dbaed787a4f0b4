"""Penalties: for leaving a reference (in a loss or a reward) and for losing entropy (in a loss).

Both are means of a function of the policy, whose gradient has to come from sampled tokens alone.
For KL(policy || reference), with d = log policy - log reference and r the importance ratio of
the token (policy over sampler; 1 on-policy):

    gradient KL = E[(d + 1) gradient log policy] = E[d gradient log policy]       over the policy
                = E[r d gradient log policy]                                      over the sampler

No estimator has that gradient by itself: differentiated as it stands, k1's is 0 in the mean, and
k3's is that of the other direction, KL(reference || policy). So the estimator chosen is the value
that is reported, and the gradient is always r d (it is k2's on-policy, verl's `k3+`, and that of
r k3: TRL's `use_bias_correction_kl`, DeepSeek-V3.2). For the entropy H in the same way:

    gradient H = -E[r (log policy + H) gradient log policy]

where H is a baseline: it does not change the mean and removes most of the noise. The model's head
computes it with the logprobs. (TRL and verl differentiate H through the logits: the same in the
mean.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal_torch.algorithms.behavior import MAX_LOG_RATIO, masked_difference
from areal_torch.algorithms.losses import with_gradient

# No healthy policy's token reaches it; AReaL and verl clamp the estimate there, too.
_MAX_KL = 10.0


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) from one sample per position.

    The estimators of joschu.net/blog/kl-approx.html. With
    d = logprobs - reference_logprobs, clamped to +-20: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d; each clamped to +-10.

    Raises:
        InvalidInput: Unknown estimator.
    """
    d = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        kl = d
    elif estimator == "k2":
        kl = d.square() / 2
    elif estimator == "k3":
        kl = torch.exp(-d) - 1 + d
    else:
        raise InvalidInput(f"kl_estimator={estimator!r}: expected 'k1', 'k2' or 'k3'")
    return kl.clamp(-_MAX_KL, _MAX_KL)


def kl_loss(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    importance: Tensor,
    loss_mask: Tensor,
    estimator: str,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of `importance` x KL estimate over loss tokens, and the sum of the estimate.

    The gradient of the first is that of KL(policy || reference) (see above), whatever the
    estimator; d is clamped to +-20 in it.

    Args:
        policy_logprobs: float [T], with gradient.
        reference_logprobs: float [T].
        importance: float [T]: r, times whatever weighs a token in the loss.
        loss_mask: bool [T].
        estimator: `k1`, `k2` or `k3`.
    """
    with torch.no_grad():
        kl = kl_estimate(policy_logprobs, reference_logprobs, estimator)
        kl = kl.masked_fill_(~loss_mask, 0.0)
        d = masked_difference(policy_logprobs, reference_logprobs, loss_mask)
        slope = d.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).mul_(importance)
        value = torch.dot(kl, importance.to(kl.dtype))
    return with_gradient(policy_logprobs, value, slope), kl.sum()


def entropy_bonus(
    policy_logprobs: Tensor, entropies: Tensor, importance: Tensor, loss_mask: Tensor
) -> Tensor:
    """Returns the sum of `importance` x entropy over loss tokens, with its gradient (see above).

    Args:
        policy_logprobs: float [T], with gradient.
        entropies: float [T], of the distributions that the tokens were chosen from.
        importance: float [T], as for `kl_loss`.
        loss_mask: bool [T].
    """
    with torch.no_grad():
        importance = importance.masked_fill(~loss_mask, 0.0)
        surprise = torch.where(loss_mask, policy_logprobs + entropies, 0.0)
        slope = surprise.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).mul_(importance).neg_()
        value = torch.where(loss_mask, entropies * importance, 0.0).sum()
    return with_gradient(policy_logprobs, value, slope)
