"""Advantages against plain loops over tokens."""

import math

import pytest
import torch

from areal.config.training import PPOActorConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import advantages, packing, penalties


def loop_gae(rewards, mask, cu_seqlens, discount, gae_lambda, values=None, bootstrap=None):
    """Token by token in Python floats: the definition."""
    result = [0.0] * len(rewards)
    for s in range(len(cu_seqlens) - 1):
        following = float(bootstrap[s]) if bootstrap is not None else 0.0
        carried = 0.0
        for t in range(int(cu_seqlens[s + 1]) - 1, int(cu_seqlens[s]) - 1, -1):
            if not mask[t]:
                continue
            value = float(values[t]) if values is not None else 0.0
            carried = (
                float(rewards[t]) + discount * following - value + discount * gae_lambda * carried
            )
            following = value
            result[t] = carried
    return torch.tensor(result, dtype=torch.float64)


def random_sequences(seed, longest=700):
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 30, (1,), generator=g))
    lengths = torch.randint(1, longest, (count,), generator=g)
    lengths[::3] = torch.randint(1, 6, lengths[::3].shape, generator=g)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    total = int(cu_seqlens[-1])
    mask = torch.rand(total, generator=g) < 0.7
    mask[cu_seqlens[:-1].long()] = False
    values = torch.randn(total, generator=g, dtype=torch.float64)
    rewards = torch.randn(total, generator=g, dtype=torch.float64)
    bootstrap = torch.randn(count, generator=g, dtype=torch.float64)
    return rewards, mask, cu_seqlens, values, bootstrap


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("discount", "gae_lambda"),
    [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.1), (0.5, 0.0), (1e-4, 1.0), (0.0, 1.0)],
)
def test_gae_when_tokens_are_masked_then_equals_a_loop(seed, discount, gae_lambda):
    rewards, mask, cu_seqlens, values, bootstrap = random_sequences(seed)
    ours, returns = advantages.gae(
        rewards,
        mask,
        cu_seqlens,
        discount=discount,
        gae_lambda=gae_lambda,
        values=values,
        bootstrap_values=bootstrap,
    )
    expected = loop_gae(rewards, mask, cu_seqlens, discount, gae_lambda, values, bootstrap)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(returns, torch.where(mask, ours + values, 0.0))


@pytest.mark.parametrize("seed", range(3))
def test_gae_when_there_is_no_critic_then_every_token_gets_the_outcome(seed):
    _, mask, cu_seqlens, _, outcome = random_sequences(seed)
    owner = packing.sequence_index(cu_seqlens)
    slopes = torch.ones_like(outcome)
    rewards = advantages.place_scores(torch.zeros(len(mask)), mask, cu_seqlens, outcome, slopes)
    ours, returns = advantages.gae(rewards, mask, cu_seqlens, discount=1.0, gae_lambda=1.0)
    torch.testing.assert_close(ours, torch.where(mask, outcome[owner], 0.0))
    torch.testing.assert_close(returns, ours)


def test_gae_when_no_token_is_in_the_loss_then_is_zero():
    rewards, mask = torch.ones(4), torch.zeros(4, dtype=torch.bool)
    ours, _ = advantages.gae(rewards, mask, torch.tensor([0, 2, 4]), discount=0.9, gae_lambda=0.9)
    assert ours.tolist() == [0.0] * 4


@pytest.mark.parametrize("coefficient", [1.0, 0.999, 0.9, 0.3, 1e-3, 1e-60, 1e-150, 0.0])
def test_gae_when_sequences_are_long_and_short_then_suffix_sums_equal_a_loop(coefficient):
    g = torch.Generator().manual_seed(7)
    lengths = torch.tensor([1, 1, 3000, 2, 256, 255, 257, 512, 1, 40])
    x = torch.randn(int(lengths.sum()), generator=g, dtype=torch.float64)
    # One sequence a million times larger spills into its neighbors no more than float64 rounds it.
    x[2:3002] *= 1e6
    expected, place = x.tolist(), 0
    for length in lengths.tolist():
        for t in range(place + length - 2, place - 1, -1):
            expected[t] += coefficient * expected[t + 1]
        place += length
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    mask = torch.ones_like(x, dtype=torch.bool)
    ours, _ = advantages.gae(x, mask, cu_seqlens, discount=coefficient, gae_lambda=1.0)
    expected = torch.tensor(expected, dtype=torch.float64)
    scale = torch.ones_like(x)
    scale[2:3002] = 1e6
    assert float(((ours - expected) / scale).abs().max()) < 1e-7


def test_place_scores_when_rewards_are_dense_then_scales_them_and_sums_to_the_score():
    rewards = torch.tensor([0.0, 0.25, 0.0, 1.0, 9.0, 0.0, 0.5])
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    placed = advantages.place_scores(
        rewards,
        mask,
        torch.tensor([0, 5, 7]),
        torch.tensor([2.0, -1.0], dtype=torch.float64),
        torch.tensor([4.0, 1.0], dtype=torch.float64),
    )
    assert placed.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, -1.0]


def test_shape_scores_when_all_settings_are_on_then_applies_them_in_order():
    config = PPOActorConfig(
        reward_bias=-0.5,
        reward_scaling=10.0,
        reward_clip=4.0,
        overlong_tokens=2,
        max_response_tokens=4,
        overlong_penalty_factor=0.5,
        mask_no_eos_with_zero=True,
    )
    batch = packing.pack(
        [
            {
                "input_ids": [1] * (n + 1),
                "loss_mask": [False] + [True] * n,
                "rewards": [0.0] * n + [1.0],
            }
            for n in (2, 3, 4, 2)
        ]
    )
    batch["truncated"] = torch.tensor([False, False, False, True])
    scores, slopes = advantages.shape_scores(batch, config)
    # Penalties 0, .25, .5; (1 - .5) * 10 = 5 is clipped to 4; the last was cut off.
    assert scores.tolist() == [4.0, 2.5, 0.0, 0.0]
    assert slopes.tolist() == [0.0, 10.0, 10.0, 0.0]


def test_shape_scores_when_truncation_is_unknown_then_says_what_is_missing():
    batch = packing.pack([{"input_ids": [1, 2], "loss_mask": [0, 1], "rewards": [0.0, 1.0]}])
    with pytest.raises(InvalidInput, match="truncated"):
        advantages.shape_scores(batch, PPOActorConfig(mask_no_eos_with_zero=True))


def test_kl_estimate_when_ratios_are_extreme_then_is_clamped():
    d = torch.tensor([1000.0, -1000.0])
    zero = torch.zeros(2)
    assert penalties.kl_estimate(d, zero, "k1").tolist() == [10.0, -10.0]
    assert penalties.kl_estimate(d, zero, "k3").tolist() == [10.0, 10.0]
    assert math.isclose(
        float(penalties.kl_estimate(torch.tensor(0.3), torch.tensor(0.1), "k3")),
        math.exp(-0.2) - 1 + 0.2,
        rel_tol=1e-5,
    )
    with pytest.raises(InvalidInput, match="k4"):
        penalties.kl_estimate(d, zero, "k4")


def test_drgrpo_when_configured_then_only_centers():
    config = PPOActorConfig(reward_norm="group/none", reward_clip=100.0)
    batch = packing.pack(
        [
            {"input_ids": [1, 2], "loss_mask": [0, 1], "rewards": [0.0, reward]}
            for reward in (1.0, 0.0, 0.0, 7.0, 9.0)
        ],
        group_index=[4, 4, 4, 2, 2],
    )
    scores, _ = advantages.shape_scores(batch, config)
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3, -1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(scores, expected)
