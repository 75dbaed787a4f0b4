"""Reward functions that ship with the library, by the name that recipes and clients use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from areal.errors import InvalidInput, nearest


@dataclass(frozen=True)
class BuiltinReward:
    """One reward: where it is, and what it does."""

    module: str
    """Imported when a worker first needs the reward, so that a reward that needs torch does not
    slow others down."""
    function: str
    """A function of the module, or a class, of which each process creates one instance with the
    fixed arguments."""
    meaning: str
    """Completes the sentence "The reward …" in the documentation."""
    checks_text: bool = True
    """Whether its time depends on the texts alone. Then an answer that takes too long scores 0."""


BUILTIN: dict[str, BuiltinReward] = {
    "math": BuiltinReward(
        "areal.rewards.math",
        "math_reward",
        "compares a final answer with the row's `answer`: numbers and LaTeX",
    ),
    "multiple_choice": BuiltinReward(
        "areal.rewards.multiple_choice",
        "multiple_choice_reward",
        "compares the letter that the text chooses with the row's `answer`",
    ),
    "regex": BuiltinReward(
        "areal.rewards.regex", "regex_reward", "matches the text with the argument `pattern`"
    ),
    "reward_model": BuiltinReward(
        "areal_torch.engines.reward_scorer",
        "RewardModel",
        "scores with an exported reward model ([example](../examples/tldr.py))",
        checks_text=False,
    ),
}
"""The one table of built-in rewards: help texts, docs/rewards.md and docs/api.md follow it."""

CHECKERS = frozenset(name for name, reward in BUILTIN.items() if reward.checks_text)
"""Built-in rewards whose time depends on the texts alone: one that is too slow scores 0."""


def builtin_reward(name: str) -> Callable[..., Any]:
    """Returns the built-in reward function of that name.

    Raises:
        InvalidInput: The function does not exist (the message names the nearest one), or it needs a
            package that is not installed here.
    """
    if name not in BUILTIN:
        raise InvalidInput(f"reward {name!r}: no such built-in{nearest(name, BUILTIN)}")
    found = BUILTIN[name]
    try:
        module = importlib.import_module(found.module)
        return cast("Callable[..., Any]", getattr(module, found.function))
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"reward {name!r}: needs the package {error.name!r}, which is not installed where "
            "areal-reward runs"
        ) from None
