"""Logprobs as small as they come: no infinity and no NaN, in value, gradient or statistics."""

import math

import pytest
import torch
from tests.unit.areal_torch.algorithms import summed

from areal_torch.algorithms import behavior, penalties

SEEDS = range(4)
LIMIT = 20.0
CU_SEQLENS = torch.tensor([0, 10, 11, 40, 60])


def inputs(seed, dtype, count=60):
    """Random tokens, a third of them with a logprob far below or above what is compared."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, generator=g) < 0.8
    behavior = -torch.randn(count, generator=g, dtype=torch.float64).abs()
    proximal = behavior + 0.5 * torch.randn(count, generator=g, dtype=torch.float64)
    policy = proximal + 0.3 * torch.randn(count, generator=g, dtype=torch.float64)
    for tensor in (behavior, proximal, policy):
        extreme = torch.rand(count, generator=g) < 0.15
        size = torch.rand(count, generator=g, dtype=torch.float64) * 9999
        tensor[extreme] -= size[extreme]
    advantages = torch.randn(count, generator=g, dtype=torch.float64)
    advantages[::4] = 0.0
    return *(t.to(dtype) for t in (policy, proximal, behavior, advantages)), mask


def loss_of(loss_fn, policy, proximal, sampled, advantages, mask, *, decoupled, cap=None):
    if not decoupled:
        return loss_fn(policy, sampled, advantages, mask)
    weight, stats = behavior.behavior_weight(proximal, sampled, mask, cap)
    loss, more = loss_fn(policy, proximal, advantages, mask, weight=weight)
    return loss, stats | more


def clamped_exp(x):
    """(exp of the clamped x, derivative), in Python's float64."""
    value = math.exp(max(-LIMIT, min(LIMIT, x)))
    return value, value if abs(x) <= LIMIT else 0.0


def closed_form(p, q, b, a, *, decoupled, cap):
    """(loss, derivative by p) of one token with eps_clip 0.2."""
    ratio, slope = clamped_exp(p - (q if decoupled else b))
    weight = clamped_exp(q - b)[0] if decoupled else 1.0
    if decoupled and cap is not None and weight > cap:
        return 0.0, 0.0
    unclipped, clipped = -a * ratio, -a * min(max(ratio, 0.8), 1.2)
    return weight * max(unclipped, clipped), 0.0 if clipped > unclipped else weight * -a * slope


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("decoupled", "cap"), [(True, 5.0), (True, None), (False, None)])
def test_ppo_actor_loss_when_logprobs_are_extreme_then_equals_the_clamped_closed_form(
    seed, decoupled, cap
):
    *tensors, mask = inputs(seed, torch.float64)
    rows = zip(*(t.tolist() for t in tensors), mask.tolist(), strict=True)
    expected = [
        closed_form(p, q, b, a, decoupled=decoupled, cap=cap) if m else (0.0, 0.0)
        for p, q, b, a, m in rows
    ]
    policy, *others = tensors
    policy.requires_grad_()
    loss, _ = loss_of(summed.ppo_actor_loss, policy, *others, mask, decoupled=decoupled, cap=cap)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(sum(value for value, _ in expected), rel=1e-12)
    slopes = torch.tensor([slope for _, slope in expected], dtype=torch.float64)
    torch.testing.assert_close(policy.grad, slopes, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_actor_loss_when_a_sequences_ratio_is_extreme_then_equals_the_clamped_closed_form(
    seed,
):
    policy, _, sampled, advantages, mask = inputs(seed, torch.float64)
    policy.requires_grad_()
    loss, stats = summed.ppo_actor_loss(
        policy,
        sampled,
        advantages,
        mask,
        importance_sampling_level="sequence",
        cu_seqlens=CU_SEQLENS,
    )
    loss.backward()
    total, slopes, beyond = 0.0, torch.zeros_like(policy), 0
    for begin, end in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        m = mask[begin:end]
        count = int(m.sum())
        if not count:
            continue
        mean = float((policy.detach() - sampled)[begin:end][m].sum()) / count
        a = float(advantages[begin:end][m].sum()) / count
        ratio, slope = clamped_exp(mean)
        beyond += abs(mean) > LIMIT
        unclipped, clipped = -a * ratio, -a * min(max(ratio, 0.8), 1.2)
        total += count * max(unclipped, clipped)
        slopes[begin:end][m] = 0.0 if clipped > unclipped else -a * slope
    assert beyond
    assert float(loss.detach()) == pytest.approx(total, rel=1e-9)
    torch.testing.assert_close(policy.grad, slopes, rtol=1e-9, atol=1e-12)
    assert all(math.isfinite(float(value)) for value in stats.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_fn", [summed.ppo_actor_loss, summed.cispo_loss, summed.sapo_loss])
@pytest.mark.parametrize("decoupled", [True, False])
def test_losses_when_logprobs_are_extreme_in_float32_then_everything_is_finite(
    seed, loss_fn, decoupled
):
    policy, proximal, sampled, advantages, mask = inputs(seed, torch.float32)
    sampled[3], mask[3], advantages[3] = -torch.inf, True, 0.0
    for tensor in (policy, proximal, sampled, advantages):
        tensor[~mask] = torch.nan
    policy.requires_grad_()
    loss, stats = loss_of(
        loss_fn, policy, proximal, sampled, advantages, mask, decoupled=decoupled, cap=5.0
    )
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert bool(policy.grad.isfinite().all())
    for name, value in stats.items():
        assert math.isfinite(float(value)), name


def test_ppo_actor_loss_when_a_placeholder_meets_advantage_zero_then_is_zero():
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, _ = summed.ppo_actor_loss(
        policy,
        torch.tensor([-9999.0, -100.0]),
        torch.zeros(2),
        torch.tensor([True, True]),
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert policy.grad.tolist() == [0.0, 0.0]


def test_behavior_weight_when_a_token_is_dropped_then_the_mean_is_of_the_others():
    weight, stats = behavior.behavior_weight(
        torch.tensor([-1.0, -1.0, -1.0, 0.0]),
        torch.tensor([-1.5, -0.5, -300.0, 0.0]),
        torch.tensor([True, True, True, False]),
        5.0,
    )
    kept = [math.exp(0.5), math.exp(-0.5)]
    assert weight.tolist() == pytest.approx([*kept, 0.0, 0.0])
    assert float(stats["behavior_weight"]) == pytest.approx(sum(kept))
    assert int(stats["behavior_weight_capped_ratio"]) == 1
    assert float(stats["behavior_weight_max"]) == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimate_when_a_logprob_is_infinite_then_is_clamped(estimator):
    ours = penalties.kl_estimate(
        torch.tensor([-torch.inf, 0.0]), torch.tensor([0.0, -torch.inf]), estimator
    )
    assert ours.abs().tolist() == [10.0, 10.0]
