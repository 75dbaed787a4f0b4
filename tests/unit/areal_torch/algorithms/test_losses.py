"""Losses against loops over tokens, on several seeds and all settings."""

import math
from itertools import pairwise

import pytest
import torch
from tests.unit.areal_torch.algorithms import summed

from areal_torch.algorithms import behavior, losses

SEEDS = range(5)


def inputs(seed, count=60):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, generator=g) < 0.7
    sampled = -torch.randn(count, generator=g, dtype=torch.float64).abs()
    proximal = sampled + 0.7 * torch.randn(count, generator=g, dtype=torch.float64)
    policy = proximal + 0.5 * torch.randn(count, generator=g, dtype=torch.float64)
    advantages = torch.randn(count, generator=g, dtype=torch.float64)
    return policy, proximal, sampled, advantages, mask


def weighted(loss_fn, policy, proximal, sampled, advantages, mask, *, cap=None, **options):
    """A loss of decoupled PPO: around the proximal policy, with behavior weights."""
    weight, stats = behavior.behavior_weight(proximal, sampled, mask, cap)
    loss, more = loss_fn(policy, proximal, advantages, mask, weight=weight, **options)
    return loss, stats | more


def decoupled_ppo(*tensors, **options):
    return weighted(summed.ppo_actor_loss, *tensors, **options)


def plain_ppo(policy, proximal, sampled, advantages, mask, **options):
    return summed.ppo_actor_loss(policy, sampled, advantages, mask, **options)


def loop_ppo(policy, proximal, sampled, advantages, mask, *, low, high, c_clip, cap, decoupled):
    """The formulas of the docstring, one token at a time."""
    total = 0.0
    for p, q, b, a, m in zip(policy, proximal, sampled, advantages, mask, strict=True):
        if not m:
            continue
        p, q, b, a = float(p), float(q), float(b), float(a)
        ratio = math.exp(p - (q if decoupled else b))
        loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        if c_clip is not None and a < 0:
            loss = min(loss, c_clip * -a)
        weight = math.exp(q - b) if decoupled else 1.0
        if decoupled and cap is not None and weight > cap:
            continue
        total += weight * loss
    return total


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("cap", [None, 1.5, 5.0])
@pytest.mark.parametrize("c_clip", [None, 1.1, 3.0])
@pytest.mark.parametrize("higher", [None, 0.4])
def test_ppo_actor_loss_when_settings_vary_then_equals_a_loop(seed, decoupled, cap, c_clip, higher):
    tensors = inputs(seed)
    options = {"eps_clip": 0.2, "eps_clip_higher": higher, "c_clip": c_clip}
    if decoupled:
        ours, _ = decoupled_ppo(*tensors, cap=cap, **options)
    else:
        ours, _ = plain_ppo(*tensors, **options)
    expected = loop_ppo(
        *tensors, low=0.2, high=higher or 0.2, c_clip=c_clip, cap=cap, decoupled=decoupled
    )
    assert float(ours) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_actor_loss_when_decoupled_without_cap_then_still_weights(seed):
    policy, proximal, sampled, advantages, mask = inputs(seed)
    policy.requires_grad_()
    loss, _ = decoupled_ppo(policy, proximal, sampled, advantages, mask, eps_clip=0.99)
    loss.backward()
    weight = (proximal - sampled).exp()
    ratio = (policy.detach() - proximal).exp()
    inside = mask & (ratio < 1.99) & (ratio > 0.01)
    expected = -(weight * ratio * advantages)
    torch.testing.assert_close(policy.grad[inside], expected[inside])


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_actor_loss_when_capped_then_drops_tokens_but_counts_them(seed):
    policy, proximal, sampled, advantages, mask = inputs(seed)
    policy.requires_grad_()
    loss, stats = decoupled_ppo(policy, proximal, sampled, advantages, mask, cap=1.2)
    loss.backward()
    dropped = mask & ((proximal - sampled).exp() > 1.2)
    assert int(stats["behavior_weight_capped_ratio"]) == int(dropped.sum()) > 0
    assert bool((policy.grad[dropped] == 0).all())
    assert bool((policy.grad[~mask] == 0).all())
    # The weights' sum is that of the tokens that are kept; the largest shows the dropped ones too.
    weight = (proximal - sampled).exp()
    torch.testing.assert_close(stats["behavior_weight"], weight[mask & ~dropped].sum())
    torch.testing.assert_close(stats["behavior_weight_max"], weight[mask].max())


def test_ppo_actor_loss_when_masked_tokens_are_not_finite_then_ignores_them():
    policy, proximal, sampled, advantages, mask = inputs(0)
    expected, _ = decoupled_ppo(policy, proximal, sampled, advantages, mask, c_clip=2.0)
    for tensor in (policy, proximal, sampled):
        tensor[~mask] = float("nan")
    policy.requires_grad_()
    ours, stats = decoupled_ppo(policy, proximal, sampled, advantages, mask, c_clip=2.0)
    ours.backward()
    torch.testing.assert_close(ours.detach(), expected)
    assert bool(torch.isfinite(policy.grad).all())
    assert all(math.isfinite(float(value)) for value in stats.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_actor_loss_when_sequence_level_then_equals_a_loop(seed):
    policy, _, sampled, advantages, mask = inputs(seed)
    cu_seqlens = torch.tensor([0, 7, 8, 40, 60])
    ours, _ = summed.ppo_actor_loss(
        policy,
        sampled,
        advantages,
        mask,
        importance_sampling_level="sequence",
        cu_seqlens=cu_seqlens,
    )
    total = 0.0
    for begin, end in pairwise(cu_seqlens.tolist()):
        m = mask[begin:end]
        if not m.any():
            continue
        ratio = float((policy - sampled)[begin:end][m].mean().exp())
        a = float(advantages[begin:end][m].mean())
        total += int(m.sum()) * max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))
    assert float(ours) == pytest.approx(total, rel=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_loss_when_ratios_are_clipped_then_keeps_their_gradient(seed):
    policy, proximal, sampled, advantages, mask = inputs(seed)
    policy.requires_grad_()
    loss, stats = weighted(
        summed.cispo_loss, policy, proximal, sampled, advantages, mask, eps_clip_higher=0.3
    )
    loss.backward()
    ratio = (policy.detach() - proximal).exp()
    weight = (proximal - sampled).exp()
    expected = torch.where(mask, -weight * ratio.clamp(0.8, 1.3) * advantages, 0.0)
    torch.testing.assert_close(policy.grad, expected)
    clipped = mask & ((ratio < 0.8) | (ratio > 1.3))
    assert int(stats["clip_ratio"]) == int(clipped.sum()) > 0


def test_losses_when_split_into_parts_then_sums_add_up():
    tensors = inputs(3)
    whole, whole_stats = decoupled_ppo(*tensors, c_clip=2.0, cap=2.0)
    parts = [
        decoupled_ppo(*(t[a:b] for t in tensors), c_clip=2.0, cap=2.0)
        for a, b in ((0, 13), (13, 50), (50, 60))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in whole_stats.items():
        values = [float(stats[name]) for _, stats in parts]
        joined = max(values) if name.endswith("_max") else sum(values)
        assert joined == pytest.approx(float(value))


@pytest.mark.parametrize(("version", "alpha"), [(7, 0.0), (6, 1 / 2), (4, 3 / 4), (9, 0.0)])
def test_loglinear_when_token_has_an_age_then_interpolates(version, alpha):
    ours = behavior.loglinear_proximal_logprobs(
        torch.tensor([-1.0, 0.0]),
        torch.tensor([-3.0, 0.0]),
        torch.tensor([version, -1]),
        torch.tensor([True, False]),
        proximal_version=7,
    )
    assert ours.tolist() == pytest.approx([-3.0 + 2.0 * alpha, 0.0])


def test_sft_loss_when_masked_then_sums_the_rest():
    loss, stats = losses.sft_loss(
        torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([True, False, True])
    )
    assert float(loss) == 5.0
    assert stats == {}
