"""`algorithm`: the settings that make decoupled PPO the algorithm of that name.

An experiment file or an override wins over a preset, key by key. docs/algorithms.md is
generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal


@dataclass(frozen=True)
class Preset:
    """The settings of an algorithm, and its source."""

    name: str
    """The name as its authors write it."""
    paper: str
    """arXiv number."""
    formula: str
    """R: a sequence's shaped reward; A: advantage; r: ratio; see docs/algorithms.md."""
    actor: dict[str, Any]
    rollout: dict[str, Any] = field(default_factory=dict)
    critic: dict[str, Any] | None = None
    """{}: it has a critic."""
    note: str = ""
    """What a reader of the paper should know."""


def _grpo(**changes: Any) -> dict[str, Any]:
    return {"loss_type": "ppo", "reward_norm": "group/group", "adv_norm": None, **changes}


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "GRPO",
        "2402.03300",
        "A = (R - mean(group)) / (std(group) + 1e-5)",
        _grpo(),
        note="The loss is a mean over tokens, as in current AReaL, verl and TRL. For the paper's "
        "mean over sequences, set `actor.loss_aggregation=sequence_mean`; for its KL term, set "
        "`actor.kl_loss_ctl`.",
    ),
    "ppo": Preset(
        "PPO",
        "1707.06347",
        "A = Σ_k λ^k δ_k, normalized over the batch's tokens; δ = (token reward) + V_next - V",
        _grpo(reward_norm=None, adv_norm="batch/batch", gae_lambda=0.95),
        critic={},
        note="The recipe must create a critic (`FSDPPPOCritic`), as examples/ppo_critic.py does. V "
        "is the critic's value of a token. V_next after an answer's last token is 0, or, if the "
        "answer was cut off, the critic's value of what it came to. The critic's loss is half the "
        "squared error, averaged over tokens. New values are clipped to within 0.2 of the values "
        "at the start of the update.",
    ),
    "dr_grpo": Preset(
        "Dr. GRPO",
        "2503.20783",
        "A = R - mean(group); a sequence's loss = (sum over its tokens) / max_new_tokens",
        _grpo(reward_norm="group/none", loss_aggregation="constant"),
        note="There is no division by the standard deviation or by the response's length.",
    ),
    "rloo": Preset(
        "RLOO",
        "2402.14740",
        "A = R - mean(others of the group)",
        _grpo(reward_norm="leave1out/none"),
    ),
    "reinforce": Preset("REINFORCE", "", "A = R", _grpo(reward_norm=None)),
    "reinforce_pp": Preset(
        "REINFORCE++",
        "2501.03262",
        "A = R - Σ KL, normalized over the batch's tokens",
        _grpo(reward_norm=None, adv_norm="batch/batch"),
        note="For the paper's KL term, which is part of the token rewards, set `actor.kl_ctl`.",
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++-baseline",
        "2501.03262",
        "A = R - mean(group), normalized over the batch's tokens",
        _grpo(reward_norm="group/none", adv_norm="batch/batch"),
        note="For the paper's KL term, which is part of the loss, set `actor.kl_loss_ctl` and "
        "`actor.kl_estimator=k2`.",
    ),
    "lite_ppo": Preset(
        "LitePPO",
        "2508.08221",
        "A = (R - mean(group)) / (std(batch) + 1e-5)",
        _grpo(reward_norm="group/batch"),
    ),
    # One ratio per sequence, which moves far less than a token's.
    "gspo": Preset(
        "GSPO",
        "2507.18071",
        "r = exp(mean over the sequence of log π/π_proximal); each sequence counts once",
        _grpo(
            loss_type="gspo",
            eps_clip=3e-4,
            eps_clip_higher=4e-4,
            loss_aggregation="sequence_mean",
            # A stale sequence is weighted whole, as it is clipped whole: with a weight for each
            # token, averaged over the sequence, arithmetic unlearns what it knows in 13 steps.
            behavior_weight_mode="sequence_truncate",
        ),
    ),
    # Not bounded from below; above at 5, as ScaleRL (arXiv 2510.13786) found it to make little
    # difference between 4 and 8.
    "cispo": Preset(
        "CISPO",
        "2506.13585",
        "l = -sg(min(r, 5)) A log π",
        _grpo(loss_type="cispo", eps_clip=1.0, eps_clip_higher=4.0),
    ),
    "sapo": Preset(
        "SAPO",
        "2511.20347",
        "l = -A (4/τ) sigmoid(τ (r - 1)), τ = 1 where A > 0, else 1.05; each sequence counts once",
        _grpo(loss_type="sapo", loss_aggregation="sequence_mean"),
    ),
    # The penalty is over the last fifth of the longest response (4096 of 20480 tokens).
    "dapo": Preset(
        "DAPO",
        "2503.14476",
        "r is clipped to [0.8, 1.28]; R is reduced by a penalty that grows from 0 to 1 over the "
        "last fifth of max_new_tokens",
        _grpo(eps_clip=0.2, eps_clip_higher=0.28, overlong_tokens=0.2),
        {"dynamic_sampling": True},
        note="Groups whose rewards are all equal are rejected, and other rows take their place.",
    ),
    "m2po": Preset(
        "M2PO",
        "2510.01161",
        "the tokens with the largest (log π/π_behavior)² are left out until the mean of the rest "
        "is below 0.04; nothing is clipped",
        _grpo(
            behavior_weight_mode="second_moment",
            behavior_weight_cap=0.04,
            eps_clip=1.0,
            eps_clip_higher=1e9,  # above any ratio: the objective has no clip
        ),
        note="All tokens count, as in the paper's text and in AReaL. In the authors' code only "
        "those count, and are left out, whose probability has moved in the direction of their "
        "advantage (A > 0 and π > π_behavior, or both reversed), and none within 0.7 to 1.5. The "
        "choice is made from the tokens of all ranks in each minibatch, with π as it is just "
        "before that minibatch's update; AReaL chooses from each micro-batch, with the π of the "
        "start of the update, and also clips. The weight π_proximal/π_behavior of a token that "
        "stays has no cap.",
    ),
}


if TYPE_CHECKING:
    Algorithm = str
else:
    Algorithm = Literal[tuple(PRESETS)]


def preset(algorithm: str, max_new_tokens: int) -> dict[str, dict[str, Any]]:
    """Returns the keys that an algorithm sets, by section.

    Args:
        algorithm: A name in `PRESETS`.
        max_new_tokens: The limit for a response; DAPO's penalty begins at a fraction of it.
    """
    chosen = PRESETS[algorithm]
    actor = dict(chosen.actor)
    if "overlong_tokens" in actor:
        actor["overlong_tokens"] = max(1, round(actor["overlong_tokens"] * max_new_tokens))
    sections = {"actor": actor, "rollout": dict(chosen.rollout)}
    return sections if chosen.critic is None else sections | {"critic": dict(chosen.critic)}
