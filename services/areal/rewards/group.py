"""Rewards that compare the samples of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "scores_group"


def group_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a reward function as one that scores all samples of a group in one call.

    Args:
        function: A reward function of the recipe, `async` or not. It gets the same arguments as
            other reward functions, but `completions` is a list of texts and `completion_ids` is a
            list of lists. It returns a list with a number or a `rubric(...)` for each completion,
            in order.

    Returns:
        The same function.

    Example:
        >>> @group_reward
        ... def shortest(completions, answer, **data) -> list[float]:
        ...     least = min(map(len, completions)) + 1  # a text may be empty
        ...     return [float(answer in text) * least / (len(text) + 1) for text in completions]
    """
    setattr(function, _MARK, True)
    return function


def scores_group(function: Any) -> bool:
    """Whether a reward function scores groups; a built-in's name does not."""
    return bool(getattr(function, _MARK, False))
