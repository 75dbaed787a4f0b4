"""Reward functions that ship with the library, by the name that recipes and clients use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from areal.errors import InvalidInput, nearest

# name -> (module, function); a module is imported when its reward is first asked for, one that
# needs torch by no one else. A class is made once in each process, with the fixed arguments.
BUILTIN = {
    "math": ("areal.rewards.math", "math_reward"),
    "multiple_choice": ("areal.rewards.multiple_choice", "multiple_choice_reward"),
    "reward_model": ("areal_torch.engines.reward_scorer", "RewardModel"),
    "regex": ("areal.rewards.regex", "regex_reward"),
}

CHECKERS = frozenset({"math", "multiple_choice", "regex"})
"""Built-in rewards whose time depends on the texts alone: one that is too slow scores 0."""


def builtin_reward(name: str) -> Callable[..., Any]:
    """Returns the built-in reward function of that name.

    Raises:
        InvalidInput: The function does not exist (the message names the nearest one), or it needs a
            package that is not installed here.
    """
    if name not in BUILTIN:
        raise InvalidInput(f"reward {name!r}: no such built-in{nearest(name, BUILTIN)}")
    module, function = BUILTIN[name]
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), function))
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"reward {name!r}: needs the package {error.name!r}, which is not installed where "
            "areal-reward runs"
        ) from None
