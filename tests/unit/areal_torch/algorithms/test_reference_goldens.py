"""Our numerics against what AReaL and verl computed (recorded by tools/reference_goldens.py)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.areal_torch.algorithms import summed

from areal.config.training import PPOActorConfig
from areal_torch.algorithms import advantages, behavior, normalization, penalties

GOLDEN = Path(__file__).parent / "golden"
SEEDS = range(4)


class Case:
    """One seed of a golden file, padded rows turned into a packed batch."""

    def __init__(self, package, seed):
        with np.load(GOLDEN / f"{package}.npz") as file:
            prefix = f"{seed}."
            self.arrays = {
                k.removeprefix(prefix): torch.from_numpy(file[k])
                for k in file.files
                if k.startswith(prefix)
            }
        self.attention = self.arrays["attention"]
        lengths = self.arrays["lengths"]
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        self.mask = self["loss_mask"]

    def __getitem__(self, name):
        return self.arrays[name][self.attention]

    def batch(self, group_index):
        lengths = self.arrays["lengths"]
        rewards = torch.zeros(self.attention.shape)
        rewards[torch.arange(len(lengths)), lengths - 1] = self.arrays["scores"]
        return {
            "cu_seqlens": self.cu_seqlens,
            "group_index": group_index,
            "loss_mask": self.mask,
            "rewards": rewards[self.attention],
            "truncated": lengths == self.attention.shape[1],
        }

    def unshift(self, name):
        """AReaL's index t predicts token t + 1; ours describes token t."""
        return torch.roll(self.arrays[name], 1, -1)[self.attention]


def assert_loss(case, name, loss_of, argument="policy_logprobs"):
    """Compare the mean over loss tokens and its gradient."""
    x = case[argument].clone().requires_grad_()
    loss_sum, _ = loss_of(x)
    loss = loss_sum / case.mask.sum()
    loss.backward()
    torch.testing.assert_close(loss.detach(), case.arrays[f"{name}.loss"], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(x.grad, case[f"{name}.grad"], rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("decoupled", {}),
        ("capped", {"cap": 2.0, "eps_clip_higher": 0.28}),
        ("truncated", {"cap": 2.0, "mode": "token_truncate"}),
        ("dual", {"cap": 2.0, "c_clip": 1.5}),
        ("sequence", {"importance_sampling_level": "sequence"}),
    ],
)
def test_ppo_actor_loss_when_decoupled_then_equals_areal(seed, name, options):
    case = Case("areal", seed)
    proximal, options = case["proximal_logprobs"], dict(options)
    weight, _ = behavior.behavior_weight(
        proximal,
        case["behavior_logprobs"],
        case.mask,
        options.pop("cap", None),
        mode=options.pop("mode", "token_mask"),
    )
    assert_loss(
        case,
        name,
        lambda p: summed.ppo_actor_loss(
            p,
            proximal,
            case["advantages"],
            case.mask,
            weight=weight,
            cu_seqlens=case.cu_seqlens,
            **options,
        ),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_actor_loss_when_decoupled_without_cap_then_differs_from_areals_silent_plain_ppo(seed):
    """AReaL without rejection_sampling drops the behavior weight; ours never does."""
    case = Case("areal", seed)
    proximal, rest = case["proximal_logprobs"], (case["advantages"], case.mask)
    plain = float(case.arrays["plain.loss"])
    weight, _ = behavior.behavior_weight(proximal, case["behavior_logprobs"], case.mask, None)
    ours, _ = summed.ppo_actor_loss(case["policy_logprobs"], proximal, *rest, weight=weight)
    assert abs(float(ours / case.mask.sum()) - plain) > 1e-2
    # What it computes is plain PPO around the proximal policy.
    assert_loss(
        case,
        "plain",
        lambda p: summed.ppo_actor_loss(p, proximal, *rest),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_loglinear_when_versions_vary_then_equals_areal(seed):
    case = Case("areal", seed)
    ours = behavior.loglinear_proximal_logprobs(
        case["policy_logprobs"], case["behavior_logprobs"], case["versions"], case.mask, 4
    )
    torch.testing.assert_close(ours, torch.where(case.mask, case["loglinear"], 0.0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_advantages_when_shaped_normalized_and_penalized_then_equal_areal(seed, name):
    case = Case("areal", seed)
    critic = name == "gae"
    config = PPOActorConfig(
        reward_bias=-0.5,
        reward_scaling=2.0,
        reward_clip=3.0,
        reward_norm="group/group",
        mask_no_eos_with_zero=not critic,
    )
    batch = case.batch(torch.arange(8) // 4)
    shaped = advantages.shape_scores(batch, config)
    rewards = advantages.place_scores(batch["rewards"], case.mask, case.cu_seqlens, *shaped)
    values = bootstrap = None
    if critic:
        kl = penalties.kl_estimate(case["behavior_logprobs"], case["reference_logprobs"], "k3")
        rewards = rewards - 0.1 * torch.where(case.mask, kl, 0.0)
        values = case.unshift("values")
        # Value after the last token, of sequences as long as the padding (AReaL's sign of no end).
        bootstrap = torch.where(batch["truncated"], case.arrays["values"][:, -1], 0.0)
    ours, returns = advantages.gae(
        rewards,
        case.mask,
        case.cu_seqlens,
        discount=0.97 if critic else 1.0,
        gae_lambda=0.9 if critic else 1.0,
        values=values,
        bootstrap_values=bootstrap,
    )
    expected = torch.where(case.mask, case.unshift(f"{name}.returns"), 0.0)
    torch.testing.assert_close(returns.float(), expected, rtol=1e-5, atol=1e-5)
    ours = normalization.normalize_tokens(ours, case.mask, "batch/batch")
    expected = torch.where(case.mask, case.unshift(f"{name}.advantages"), 0.0)
    torch.testing.assert_close(ours.float(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("grpo", "group/group"),
        ("rloo", "leave1out/none"),
        ("reinforce_pp", None),
        ("reinforce_pp_baseline", "group/none"),
    ],
)
def test_group_advantages_when_groups_are_uneven_then_equal_verl(seed, name, norm):
    case = Case("verl", seed)
    batch = case.batch(case.arrays["index"])
    shaped = advantages.shape_scores(batch, PPOActorConfig(reward_norm=norm))
    rewards = advantages.place_scores(batch["rewards"], case.mask, case.cu_seqlens, *shaped)
    ours, _ = advantages.gae(rewards, case.mask, case.cu_seqlens, discount=1.0, gae_lambda=1.0)
    if name.startswith("reinforce_pp"):
        ours = normalization.normalize_tokens(ours, case.mask, "batch/batch")
    # verl's whitening has 1e-8 inside the root, ours 1e-5 beside the deviation.
    size = ours.abs().max()
    torch.testing.assert_close(ours.float() / size, case[name] / size, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_when_tool_tokens_intervene_then_equals_verl(seed):
    case = Case("verl", seed)
    batch = case.batch(case.arrays["index"])
    _, returns = advantages.gae(
        batch["rewards"],
        case.mask,
        case.cu_seqlens,
        discount=0.97,
        gae_lambda=0.9,
        values=case["values"],
    )
    expected = torch.where(case.mask, case["gae.returns"], 0.0)
    torch.testing.assert_close(returns, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimate_when_sampled_then_equals_verl(seed, kind):
    case = Case("verl", seed)
    ours = penalties.kl_estimate(case["behavior_logprobs"], case["reference_logprobs"], kind)
    torch.testing.assert_close(ours, case[kind])


@pytest.mark.parametrize("seed", SEEDS)
def test_policy_losses_when_not_decoupled_then_equal_verl(seed):
    case = Case("verl", seed)
    center = case["proximal_logprobs"]
    clip = {"eps_clip": 0.2, "eps_clip_higher": 0.28}
    assert_loss(
        case,
        "vanilla",
        lambda p: summed.ppo_actor_loss(
            p, center, case["advantages"], case.mask, c_clip=1.5, **clip
        ),
    )
    assert_loss(
        case,
        "cispo",
        lambda p: summed.cispo_loss(p, center, case["advantages"], case.mask, **clip),
    )
    assert_loss(
        case,
        "gspo",
        lambda p: summed.ppo_actor_loss(
            p,
            center,
            case["grpo"],
            case.mask,
            importance_sampling_level="sequence",
            cu_seqlens=case.cu_seqlens,
            **clip,
        ),
    )
