"""Gradients from sampled tokens against those of the divergence itself, summed over all tokens."""

import pytest
import torch
from tests.unit.areal_torch.algorithms import summed

from areal_torch.algorithms import behavior, penalties

VOCABULARY = 7


def distributions(seed, *, off_policy):
    """Logits of the policy, with gradient, and logprobs of reference and sampler, float64."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY, generator=g, dtype=torch.float64).requires_grad_()
    reference, other = torch.randn(2, VOCABULARY, generator=g, dtype=torch.float64).log_softmax(-1)
    return logits, reference, other if off_policy else logits.detach().log_softmax(-1)


def expectation(logits, sampler, term_of):
    """The gradient by the logits of the mean over the sampler's tokens of what `term_of` gives."""
    policy = logits.log_softmax(-1)
    everything = torch.ones(VOCABULARY, dtype=torch.bool)
    ratio, _ = behavior.behavior_weight(policy, sampler, everything, None)
    value = term_of(policy, ratio * sampler.exp(), everything)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_kl_loss_when_summed_over_all_tokens_then_has_the_divergences_gradient(
    seed, estimator, off_policy
):
    logits, reference, sampler = distributions(seed, off_policy=off_policy)
    value, ours = expectation(
        logits,
        sampler,
        lambda p, w, mask: penalties.kl_loss(p, reference, w, mask, estimator)[0],
    )
    policy = logits.log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    if estimator != "k2":
        torch.testing.assert_close(value, divergence.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("off_policy", [False, True])
def test_entropy_bonus_when_summed_over_all_tokens_then_has_the_entropys_gradient(seed, off_policy):
    logits, _, sampler = distributions(seed, off_policy=off_policy)
    policy = logits.log_softmax(-1)
    entropy = -(policy.exp() * policy).sum()
    each = entropy.detach().expand(VOCABULARY)
    value, ours = expectation(
        logits, sampler, lambda p, w, mask: penalties.entropy_bonus(p, each, w, mask)
    )
    (expected,) = torch.autograd.grad(entropy, logits)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(value, entropy.detach(), rtol=1e-9, atol=1e-12)


def test_penalties_when_tokens_are_masked_then_ignore_whatever_stands_there():
    nan, mask = float("nan"), torch.tensor([True, False])
    policy = torch.tensor([-1.0, nan], requires_grad=True)
    ones = torch.tensor([1.0, nan])
    kl, reported = penalties.kl_loss(
        policy, torch.tensor([-1.5, nan]), torch.tensor([1.0, 0.0]), mask, "k1"
    )
    bonus = penalties.entropy_bonus(policy, torch.tensor([2.0, nan]), ones, mask)
    (kl - bonus).backward()
    assert (kl.item(), reported.item(), bonus.item()) == pytest.approx((0.5, 0.5, 2.0))
    # d = .5 of the divergence; the entropy's is -(log policy + H) = -1, and it is subtracted.
    assert policy.grad.tolist() == pytest.approx([0.5 + 1.0, 0.0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss_fn", [summed.ppo_actor_loss, summed.sapo_loss])
def test_losses_when_checked_numerically_then_gradients_are_the_derivatives(seed, loss_fn):
    g = torch.Generator().manual_seed(seed)
    center, advantages = torch.randn(2, 12, generator=g, dtype=torch.float64)
    weight = torch.rand(12, generator=g, dtype=torch.float64)
    mask = torch.rand(12, generator=g) < 0.7
    policy = center + 0.5 * torch.randn(12, generator=g, dtype=torch.float64)
    options = {"weight": weight * mask}
    torch.autograd.gradcheck(
        lambda p: loss_fn(p, center, advantages, mask, **options)[0], (policy.requires_grad_(),)
    )


def test_second_moment_mask_when_everything_is_close_then_keeps_everything():
    mask = torch.tensor([True, True, False])
    kept = behavior.second_moment_mask(torch.zeros(3), torch.tensor([0.1, -0.1, 9.0]), mask, 0.04)
    assert torch.equal(kept, mask)


def test_second_moment_mask_when_all_are_far_then_keeps_none():
    mask = torch.tensor([True, True])
    kept = behavior.second_moment_mask(torch.zeros(2), torch.tensor([1.0, -1.0]), mask, 0.04)
    assert not kept.any()
