"""Rewards at several places of a sequence, and lengths beyond the limit."""

import math

import pytest
import torch

from areal.config.training import PPOActorConfig
from areal_torch.algorithms import advantages, packing
from areal_torch.engines.ppo import PPOActor


class OneRank:
    """All that advantages ask of an engine."""

    process_group = None


def advantages_of(batch, **options):
    """[sequences, tokens] without the advantages' own normalization."""
    config = PPOActorConfig(adv_norm=None, **options)
    PPOActor(config, OneRank()).compute_advantages(batch)
    return batch["advantages"].view(len(batch["group_index"]), -1)


def loop_penalty(length, overlong, most, factor):
    """DAPO, equation 13, in its three cases."""
    if length <= most - overlong:
        return 0.0
    if length <= most:
        return factor * ((most - overlong) - length) / overlong
    return -factor


@pytest.mark.parametrize(
    ("overlong", "most", "factor"), [(50, 200, 1.0), (200, 200, 0.5), (1, 9, 2)]
)
def test_overlong_penalty_when_beyond_the_limit_then_stays_at_the_factor(overlong, most, factor):
    lengths = torch.arange(1, 3 * most)
    ours = advantages.overlong_penalty(lengths, overlong, most, factor)
    expected = [loop_penalty(n, overlong, most, factor) for n in lengths.tolist()]
    assert ours.tolist() == pytest.approx(expected, rel=1e-12)


def process_batch(rewards, groups):
    """Sequences of one length, all tokens but the first generated, with a reward on each."""
    mask = [False] + [True] * (len(rewards[0]) - 1)
    return packing.pack(
        [{"input_ids": [1] * len(mask), "loss_mask": mask, "rewards": list(r)} for r in rewards],
        groups,
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scaling", [1.0, 10.0])
def test_process_rewards_when_normalized_then_advantages_are_the_normalized_rewards_to_go(
    seed, scaling
):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(8, 12, generator=g) + 2.0
    rewards *= torch.rand(8, 12, generator=g) < 0.5
    rewards[:, 0] = 0.0
    ours = advantages_of(
        process_batch(rewards.tolist(), [i // 4 for i in range(8)]),
        reward_norm="group/group",
        reward_clip=1e6,
        reward_scaling=scaling,
        reward_bias=-0.5,
    )
    for group in (slice(0, 4), slice(4, 8)):
        totals = [scaling * (math.fsum(row) - 0.5) for row in rewards[group].tolist()]
        mean = math.fsum(totals) / 4
        std = math.sqrt(math.fsum((t - mean) ** 2 for t in totals) / 3) + 1e-5
        for row, own in zip(rewards[group].tolist(), ours[group].tolist(), strict=True):
            # The reward still to come, bias included, against the group's mean outcome.
            expected = [(scaling * (math.fsum(row[t:]) - 0.5) - mean) / std for t in range(1, 12)]
            assert own[1:] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_process_rewards_when_small_beside_their_spread_then_the_same_future_has_the_same_sign():
    """Half of the reward is still to come; at its raw size the half that came weighs nothing."""
    rewards = [[0.0, 0.01, 0.01], [0.0, 0.0, 0.01], [0.0, 0.0, 0.0], [0.0, 0.01, 0.02]]
    last = advantages_of(process_batch(rewards, [0] * 4), reward_norm="group/group")[:, -1].tolist()
    assert last[0] == pytest.approx(last[1], rel=1e-4)
    assert last[0] < 0 < last[3]


def test_process_rewards_when_the_score_is_zeroed_or_clipped_then_only_the_outcome_is_left():
    batch = process_batch([[0.0, 3.0, 1.0], [0.0, 3.0, 9.0]], [0, 1])
    batch["truncated"] = torch.tensor([True, False])
    ours = advantages_of(batch, reward_clip=5.0, mask_no_eos_with_zero=True)
    assert ours.tolist() == [[0.0, 0.0, 0.0], [0.0, 5.0, 5.0]]
