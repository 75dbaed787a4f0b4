"""Which policy the ratio is clipped around: each combination of the two switches is one thing."""

import pytest
import torch
from tests.unit.areal_torch.algorithms.test_reference_goldens import SEEDS, Case

from areal.config.training import PPOActorConfig
from areal_torch.engines.ppo import PPOActor


class NoEngine:
    """The loss of a batch that has its proximal logprobs asks no engine."""


def loss_of(batch, policy, **options):
    actor = PPOActor(PPOActorConfig(behavior_weight_cap=None, **options), NoEngine())
    return actor._loss(policy, torch.zeros_like(policy), batch)


def one_token(**more):
    return {
        "behavior_logprobs": torch.tensor([0.0, -2.0]),
        "advantages": torch.tensor([0.0, 1.0]),
        "loss_mask": torch.tensor([False, True]),
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
        **more,
    }


@pytest.mark.parametrize("loss_type", ["ppo", "cispo"])
@pytest.mark.parametrize("recompute", [True, False])
def test_ratio_when_the_loss_is_not_decoupled_then_around_the_recomputed_policy_or_the_sampler(
    loss_type, recompute
):
    policy = torch.tensor([0.0, -1.0], requires_grad=True)
    _, stats = loss_of(
        one_token(),
        policy,
        loss_type=loss_type,
        prox_logp_method="unweighted" if recompute else "behavior",
    )
    # The policy has not moved since the start of the update; the sampler was another one.
    assert float(stats["ppo_ratio"]) == pytest.approx(1.0 if recompute else 2.718282)
    assert "behavior_weight" not in stats


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_when_not_decoupled_and_recomputed_then_equals_areal(seed):
    case = Case("areal", seed)
    policy = case["policy_logprobs"].requires_grad_()
    batch = {
        "behavior_logprobs": case["behavior_logprobs"],
        "proximal_logprobs": case["proximal_logprobs"],
        "advantages": case["advantages"],
        "loss_mask": case.mask,
        "cu_seqlens": case.cu_seqlens,
    }
    loss, _ = loss_of(batch, policy, prox_logp_method="unweighted")
    expected = float(case.arrays["plain.loss"])
    assert float(loss.detach() / case.mask.sum()) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_proximal_logprobs_when_the_center_is_the_sampler_then_are_not_used():
    policy = torch.tensor([0.0, -1.0], requires_grad=True)
    batch = one_token(proximal_logprobs=torch.tensor([0.0, -1.0]))
    _, stats = loss_of(batch, policy, prox_logp_method="behavior")
    assert float(stats["ppo_ratio"]) == pytest.approx(2.718282)


def test_loss_when_a_wrong_token_has_become_likely_then_by_default_it_is_still_pushed_down():
    policy = torch.tensor([0.0, -0.1], requires_grad=True)  # e^1.9 = 6.7 times as likely as sampled
    batch = one_token(advantages=torch.tensor([0.0, -1.0]))
    actor = PPOActor(PPOActorConfig(), NoEngine())
    loss, stats = actor._loss(policy, torch.zeros_like(policy), batch)
    loss.backward()
    assert int(stats["behavior_weight_capped_ratio"]) == 1
    assert policy.grad.tolist() == [0.0, 5.0]
