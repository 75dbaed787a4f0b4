"""`algorithm`: the settings of `actor` that make decoupled PPO the algorithm of that name.

Every loss is a mean over the batch's loss tokens: no sequence is divided by its own length.
What an experiment file or an override says wins over a preset, key by key.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

Algorithm = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "lite_ppo", "gspo", "cispo", "dapo"
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_GRPO = {"loss_type": "ppo", "reward_norm": "group/group", "adv_norm": None}

_PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: A = (r - mean of group) / std of group.
    "grpo": _GRPO,
    # arXiv 2503.20783: no standard deviation, no division by a sequence's length.
    "dr_grpo": {**_GRPO, "reward_norm": "group/none"},
    # arXiv 2402.14740: the baseline is the mean of the group's other members.
    "rloo": {**_GRPO, "reward_norm": "leave1out/none"},
    # The reward itself.
    "reinforce": {**_GRPO, "reward_norm": None},
    # arXiv 2501.03262: token advantages normalized over the batch.
    "reinforce_pp": {**_GRPO, "reward_norm": None, "adv_norm": "batch/batch"},
    # arXiv 2508.08221: mean of the group, standard deviation of the batch.
    "lite_ppo": {**_GRPO, "reward_norm": "group/batch"},
    # arXiv 2507.18071: one ratio per sequence, which moves far less than a token's.
    "gspo": {**_GRPO, "loss_type": "gspo", "eps_clip": 3e-4, "eps_clip_higher": 4e-4},
    # MiniMax-M1, arXiv 2506.13585: not bounded from below; above at 5, as ScaleRL (arXiv
    # 2510.13786) found it to make little difference between 4 and 8.
    "cispo": {**_GRPO, "loss_type": "cispo", "eps_clip": 1.0, "eps_clip_higher": 4.0},
    # arXiv 2503.14476: clip-higher, and a penalty over the last fifth of the longest response (4096
    # of 20480 tokens). Its filter of groups with equal rewards is the recipe's.
    "dapo": {**_GRPO, "eps_clip": 0.2, "eps_clip_higher": 0.28, "overlong_tokens": 0.2},
}


def preset(algorithm: str, max_new_tokens: int) -> dict[str, Any]:
    """The keys of `actor` that an algorithm sets.

    Args:
        algorithm: One of `ALGORITHMS`.
        max_new_tokens: Of a response; DAPO's penalty begins at a share of it.
    """
    settings = dict(_PRESETS[algorithm])
    if "overlong_tokens" in settings:
        settings["overlong_tokens"] = max(1, round(settings["overlong_tokens"] * max_new_tokens))
    return settings
