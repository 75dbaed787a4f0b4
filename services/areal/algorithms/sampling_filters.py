"""Which groups are worth training on: functions of one group's rewards, free of torch.

A filter takes the rewards of one group (the `n_samples` siblings of a task) and says whether to
accept it. Rejecting a group frees its place in the staleness budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal.errors import InvalidInput

GroupFilter = Callable[[Sequence[float]], bool]


def accept_all(rewards: Sequence[float]) -> bool:
    """Accept any group that has samples."""
    return len(rewards) > 0


def rewards_differ(rewards: Sequence[float], tolerance: float = 1e-6) -> bool:
    """Accept a group only if its rewards differ.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a group of equal rewards
    has zero group-normalized advantages, hence no gradient.

    Example:
        >>> rewards_differ([0.0, 1.0]), rewards_differ([1.0, 1.0]), rewards_differ([1.0])
        (True, False, False)
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) > tolerance


def mean_reward_within(low: float, high: float) -> GroupFilter:
    """Make a filter that accepts groups whose mean reward lies in [low, high].

    Args:
        low: smallest accepted mean.
        high: largest accepted mean.

    Raises:
        InvalidInput: `low` exceeds `high`.
    """
    if low > high:
        raise InvalidInput(f"low={low}: expected at most high={high}")

    def accept(rewards: Sequence[float]) -> bool:
        return len(rewards) > 0 and low <= sum(rewards) / len(rewards) <= high

    return accept


def all_of(*filters: GroupFilter) -> GroupFilter:
    """Make a filter that accepts what every one of `filters` accepts."""

    def accept(rewards: Sequence[float]) -> bool:
        return all(accepts(rewards) for accepts in filters)

    return accept
