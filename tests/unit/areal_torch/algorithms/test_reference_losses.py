"""Aggregations, KL terms, weights, SAPO and M2PO against what AReaL, verl and TRL computed."""

import pytest
import torch
from tests.unit.areal_torch.algorithms import summed
from tests.unit.areal_torch.algorithms.test_reference_goldens import SEEDS, Case, assert_loss

from areal_torch.algorithms import advantages, behavior, losses, penalties

CLIP = {"eps_clip": 0.2, "eps_clip_higher": 0.28}


def aggregated(case, aggregation, values):
    """Advantages that make the mean over tokens another mean."""
    if aggregation == "token_mean":
        return values
    lengths = advantages.sequence_sums(case.mask, case.cu_seqlens)
    weights = losses.token_weights(
        case.mask,
        case.cu_seqlens,
        aggregation,
        tokens=float(lengths.sum()),
        sequences=float((lengths > 0).sum()),
        max_tokens=32,
    )
    return values * weights.to(values.dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-mean", "sequence_mean"),
        ("seq-mean-token-sum-norm", "constant"),
    ],
)
def test_token_weights_when_the_loss_is_aggregated_then_equals_verl(seed, name, aggregation):
    case = Case("verl", seed)
    gains = aggregated(case, aggregation, case["advantages"])
    center = case["proximal_logprobs"]
    assert_loss(
        case,
        f"agg.{name}",
        lambda p: summed.ppo_actor_loss(p, center, gains, case.mask, c_clip=3.0, **CLIP),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "loss_fn", "aggregation", "options"),
    [
        ("grpo", summed.ppo_actor_loss, "sequence_mean", CLIP),
        ("dr_grpo", summed.ppo_actor_loss, "constant", CLIP),
        ("dapo", summed.ppo_actor_loss, "token_mean", CLIP),
        ("sapo", summed.sapo_loss, "sequence_mean", {}),
        ("cispo", summed.cispo_loss, "token_mean", {"eps_clip": 1.0, "eps_clip_higher": 4.0}),
        (
            "gspo",
            summed.ppo_actor_loss,
            "sequence_mean",
            {**CLIP, "importance_sampling_level": "sequence"},
        ),
    ],
)
def test_losses_when_named_as_in_trl_then_equal_it(seed, name, loss_fn, aggregation, options):
    case = Case("trl", seed)
    if name == "gspo":
        options = {**options, "cu_seqlens": case.cu_seqlens}
    one_each = case.arrays["advantages"][:, :1].expand(case.attention.shape)[case.attention]
    gains = aggregated(case, aggregation, one_each)
    center = case["proximal_logprobs"]
    assert_loss(case, name, lambda p: loss_fn(p, center, gains, case.mask, **options))


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_loss_when_off_policy_then_equals_trls_bias_correction(seed):
    case = Case("trl", seed)
    one_each = case.arrays["advantages"][:, :1].expand(case.attention.shape)[case.attention]
    center, mask = case["proximal_logprobs"], case.mask
    reference = (center + case["reference_logprobs"]) / 2

    def loss(policy):
        ratio, _ = behavior.behavior_weight(policy, center, mask, None)
        kl, _ = penalties.kl_loss(policy, reference, ratio, mask, "k3")
        clipped, stats = summed.ppo_actor_loss(policy, center, one_each, mask, **CLIP)
        return clipped + 0.1 * kl, stats

    assert_loss(case, "kl", loss)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "kind"), [("k1+", "k1"), ("k2", "k2"), ("k3+", "k3")])
def test_kl_loss_when_on_policy_then_equals_verls_straight_through_one(seed, name, kind):
    case = Case("verl", seed)
    ones = case.mask.float()
    assert_loss(
        case,
        f"loss.{name}",
        lambda p: penalties.kl_loss(p, case["reference_logprobs"], ones, case.mask, kind),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"]
)
def test_behavior_weight_when_capped_then_equals_verl(seed, mode):
    case = Case("verl", seed)
    ours, stats = behavior.behavior_weight(
        case["proximal_logprobs"],
        case["behavior_logprobs"],
        case.mask,
        2.0,
        mode=mode,
        cu_seqlens=case.cu_seqlens,
    )
    torch.testing.assert_close(ours, case[f"weight.{mode}"], rtol=1e-5, atol=1e-6)
    assert 0 < int(stats["behavior_weight_capped_ratio"]) < int(case.mask.sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("package", ["areal", "verl"])
def test_sapo_loss_when_compared_then_equals_areal_and_verl(seed, package):
    case = Case(package, seed)
    aggregation = {"areal": "token_mean", "verl": "sequence_mean"}[package]
    gains = aggregated(case, aggregation, case["advantages"])
    center = case["proximal_logprobs"]
    assert_loss(case, "sapo", lambda p: summed.sapo_loss(p, center, gains, case.mask))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threshold", [0.04, 0.3])
def test_second_moment_mask_when_compared_then_keeps_what_areal_keeps(seed, threshold):
    case = Case("areal", seed)
    ours = behavior.second_moment_mask(
        case["proximal_logprobs"], case["behavior_logprobs"], case.mask, threshold
    )
    assert torch.equal(ours, case[f"m2po.{threshold}"])
    assert 0 < int(ours.sum()) < int(case.mask.sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("package", ["areal", "verl"])
def test_value_loss_when_values_moved_then_equals_areal_and_verl(seed, package):
    case = Case(package, seed)
    tensors = (case["values"], case["returns"], case.mask)
    assert_loss(
        case,
        "critic",
        lambda values: losses.value_loss(values, *tensors, eps_clip=0.2),
        argument="new_values",
    )
