"""Each `algorithm` equals its definition on a batch small enough to do by hand."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from areal.config.experiment import GRPOConfig, as_yaml, build_config, load_service_config
from areal.config.presets import PRESETS, preset
from areal.config.training import PPOActorConfig
from areal.errors import ConfigError, InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.ppo import PPOActor

# Two groups of sequences: (generated tokens, reward), groups contiguous.
GROUPS = [[(2, 1.0), (3, 0.0), (1, 0.5)], [(2, 0.0), (1, 3.0)]]
FLAT = [each for group in GROUPS for each in group]
REWARDS = [reward for _, reward in FLAT]


class OneEngine:
    """What PPOActor needs of an engine to make advantages: no other rank."""

    process_group = None

    def get_version(self) -> int:
        return 0


def actor_of(algorithm: str, *overrides: str) -> PPOActor:
    """PPO without its critic: with values of 0 and lambda 1 its advantages are REINFORCE++'s."""
    if algorithm == "ppo":
        overrides = ("critic=null", "actor.gae_lambda=1", *overrides)
    config = build_config(GRPOConfig, None, [f"algorithm={algorithm}", *overrides])
    config.actor.dtype = "float64"
    return PPOActor(config.actor, OneEngine())


def batch_of(sequences: list[tuple[int, float]]) -> packing.Batch:
    return packing.pack(
        [
            {
                "input_ids": [1] * (n + 1),
                "loss_mask": [False] + [True] * n,
                "rewards": [0.0] * n + [reward],
                "behavior_logprobs": [0.0] + [-1.0] * n,
            }
            for n, reward in sequences
        ],
        group_index=[i for i, group in enumerate(GROUPS) for _ in group][: len(sequences)],
    )


def advantages(algorithm: str, *overrides: str) -> list[float]:
    """One advantage per sequence; that all its tokens have it is asserted."""
    actor, batch = actor_of(algorithm, *overrides), batch_of(FLAT)
    actor.compute_advantages(batch)
    found = []
    bounds = batch["cu_seqlens"].tolist()
    for begin, end in pairwise(bounds):
        own = batch["advantages"][begin:end][batch["loss_mask"][begin:end]]
        assert own.unique().numel() == 1
        found.append(float(own[0]))
    return found


def by_group(value) -> list[float]:
    """`value(reward, the group's rewards)` of each sequence."""
    return [value(r, [x for _, x in group]) for group in GROUPS for _, r in group]


def token_normalized(scores: list[float]) -> list[float]:
    tokens = [score for (n, _), score in zip(FLAT, scores, strict=True) for _ in range(n)]
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    return [(score - mean) / (std + 1e-5) for score in scores]


STANDARDIZED = by_group(lambda r, g: (r - statistics.mean(g)) / (statistics.stdev(g) + 1e-5))
DEFINITIONS = {
    "grpo": STANDARDIZED,
    "dr_grpo": by_group(lambda r, g: r - statistics.mean(g)),
    "rloo": by_group(lambda r, g: r - (sum(g) - r) / (len(g) - 1)),
    "reinforce": REWARDS,
    "reinforce_pp": token_normalized(REWARDS),
    "ppo": token_normalized(REWARDS),
    "lite_ppo": by_group(
        lambda r, g: (r - statistics.mean(g)) / (statistics.stdev(REWARDS) + 1e-5)
    ),
    "gspo": STANDARDIZED,
    "cispo": STANDARDIZED,
    "dapo": STANDARDIZED,
    "sapo": STANDARDIZED,
    "m2po": STANDARDIZED,
    "reinforce_pp_baseline": token_normalized(
        by_group(lambda r, g: r - statistics.mean(g)),
    ),
}


@pytest.mark.parametrize("algorithm", PRESETS)
def test_advantages_when_an_algorithm_is_named_then_equal_its_definition(algorithm: str) -> None:
    assert advantages(algorithm) == pytest.approx(DEFINITIONS[algorithm], abs=1e-9)


def loss_of(algorithm: str, log_ratios: list[list[float]], gains: list[float], *overrides: str):
    """The loss sum of sequences whose tokens moved by `log_ratios`; and its policy gradient."""
    actor = actor_of(algorithm, *overrides)
    batch = batch_of([(len(row), 0.0) for row in log_ratios])
    mask = batch["loss_mask"]
    batch["proximal_logprobs"] = batch["behavior_logprobs"]
    moved = torch.zeros_like(batch["behavior_logprobs"])
    moved[mask] = torch.tensor([x for row in log_ratios for x in row], dtype=moved.dtype)
    policy = (batch["behavior_logprobs"] + moved).requires_grad_()
    batch["advantages"] = torch.zeros_like(moved)
    batch["advantages"][mask] = torch.tensor(
        [a for row, a in zip(log_ratios, gains, strict=True) for _ in row], dtype=moved.dtype
    )
    loss, _ = actor._loss(policy, torch.zeros(()), batch)
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad[mask].tolist()


@pytest.mark.parametrize(
    "algorithm", ["grpo", "ppo", "dr_grpo", "rloo", "reinforce_pp", "lite_ppo"]
)
def test_loss_when_a_token_moved_then_clips_its_ratio_and_sums_over_tokens(algorithm: str) -> None:
    up = math.log(1.5)
    loss, slope = loss_of(algorithm, [[up, 0.1], [0.1]], [2.0, 1.0])
    assert loss == pytest.approx(-(2.0 * 1.2 + 2.0 * math.exp(0.1) + math.exp(0.1)), rel=1e-5)
    # No token is divided by its sequence's length; the clipped one is out.
    expected = [0.0, -2.0 * math.exp(0.1), -math.exp(0.1)]
    assert slope == pytest.approx(expected, rel=1e-5)


def test_dapo_when_named_then_clips_higher_above_and_penalizes_the_last_fifth() -> None:
    loss, _ = loss_of("dapo", [[math.log(2.0)], [math.log(0.5)]], [1.0, -1.0])
    assert loss == pytest.approx(-1.28 + 0.8, rel=1e-5)
    # Of 10 tokens the last 2 are penalized: 9 long is half, 10 whole.
    actor = actor_of("dapo", "gconfig.max_new_tokens=10", "actor.reward_norm=null")
    batch = batch_of([(8, 1.0), (9, 1.0), (10, 1.0)])
    actor.compute_advantages(batch)
    last = batch["cu_seqlens"][1:].long() - 1
    assert batch["advantages"][last].tolist() == pytest.approx([1.0, 0.5, 0.0])


def test_gspo_when_named_then_a_sequence_has_one_ratio_and_a_narrow_clip() -> None:
    # Mean log ratios 1e-4 (inside) and 1e-2 (clipped at 1 + 4e-4), whatever single tokens did.
    loss, slope = loss_of("gspo", [[0.5, -0.4998], [0.02, 0.0]], [1.0, 1.0])
    assert loss == pytest.approx(-2 * math.exp(1e-4) - 2 * 1.0004, rel=1e-6)
    assert slope == pytest.approx([-math.exp(1e-4)] * 2 + [0.0, 0.0], rel=1e-4)


def test_cispo_when_named_then_weighs_log_policy_with_the_detached_ratio_up_to_five() -> None:
    rows = [[math.log(9.0), math.log(0.01)], [math.log(2.0)]]
    _, slope = loss_of("cispo", rows, [1.0, -1.0])
    # Clipped from above alone, and clipped tokens keep their gradient.
    assert slope == pytest.approx([-5.0, -0.01, 2.0], rel=1e-5)


@pytest.mark.parametrize("algorithm", PRESETS)
def test_preset_when_a_key_is_given_in_file_or_override_then_that_wins(
    algorithm: str, tmp_path: Path
) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(f"actor: {{reward_norm: batch/none}}\nalgorithm: {algorithm}\n")
    config = build_config(GRPOConfig, file, ["actor.eps_clip=0.4"])
    assert (config.actor.reward_norm, config.actor.eps_clip) == ("batch/none", 0.4)
    others = preset(algorithm, config.gconfig.max_new_tokens)["actor"]
    for key in set(others) - {"reward_norm", "eps_clip"}:
        assert getattr(config.actor, key) == others[key]


def test_algorithm_when_the_override_names_another_than_the_file_then_the_override_counts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text("algorithm: gspo\n")
    config = build_config(GRPOConfig, file, ["algorithm=rloo"])
    assert (config.actor.loss_type, config.actor.reward_norm) == ("ppo", "leave1out/none")
    assert config.actor.eps_clip == PPOActorConfig().eps_clip


def test_resolved_file_when_written_then_shows_what_the_preset_set_and_reads_the_same(
    tmp_path: Path,
) -> None:
    config = build_config(GRPOConfig, None, ["algorithm=dapo", "gconfig.max_new_tokens=100"])
    text = as_yaml(config)
    assert OmegaConf.create(text).actor.overlong_tokens == 20
    assert OmegaConf.create(text).actor.eps_clip_higher == 0.28
    assert OmegaConf.create(text).rollout.dynamic_sampling
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert load_service_config(file) == config


def test_algorithm_when_mistyped_then_the_nearest_name_is_offered() -> None:
    with pytest.raises(ConfigError, match=r"algorithm 'gspoo': expected one of .*'gspo'"):
        build_config(GRPOConfig, None, ["algorithm=gspoo"])
    with pytest.raises(ConfigError, match=r"did you mean 'actor\.loss_aggregation'"):
        build_config(GRPOConfig, None, ["actor.loss_agregation=constant"])


def test_ppo_when_named_then_it_has_a_critic_whose_values_its_batch_needs() -> None:
    config = build_config(GRPOConfig, None, ["algorithm=ppo", "critic.lr=0.5"])
    assert config.critic is not None
    assert (config.critic.lr, config.actor.gae_lambda) == (0.5, 0.95)
    own = config.critic.engine(config.actor)
    assert own.scalar
    assert own.optimizer is not None
    assert config.actor.optimizer is not None
    assert (own.optimizer.lr, own.optimizer.beta2) == (0.5, config.actor.optimizer.beta2)
    with pytest.raises(InvalidInput, match=r"^batch has no 'values': .*compute_values"):
        PPOActor(config.actor, OneEngine()).compute_advantages(batch_of(FLAT))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor.gae_lambda=0.9"], r"^actor.gae_lambda 0.9: expected 1 without a critic"),
        (["critic={}", "actor.optimizer=null"], r"^actor.optimizer null: expected an optimizer"),
        (["algorithm=pppo"], r"did you mean 'ppo'"),
        (["critic.warmup_step=3"], r"did you mean 'critic.warmup_steps'"),
    ],
)
def test_critic_when_its_settings_do_not_fit_then_refused_in_one_line(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config(GRPOConfig, None, overrides)
