"""What the best of several answers to a row earns: pass@k, for any rewards."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean


def best_of(rewards: Sequence[float], k: int) -> float:
    """Returns the expected highest reward of `k` of a row's answers, drawn without replacement.

    If rewards are 0 and 1, this is the unbiased estimate of pass@k (Chen et al. 2021,
    arXiv:2107.03374, equation 1).

    Args:
        rewards: Of the row's n answers, in any order.
        k: From 1 to n.
    """
    ranked, ways = sorted(rewards), comb(len(rewards), k)
    # The answer of rank i is the best of comb(i, k - 1) draws: the others have lower ranks.
    return sum(reward * (comb(i, k - 1) / ways) for i, reward in enumerate(ranked))


def pass_at(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the mean of `best_of` over rows for k = 2, 4, 8, … and the number of answers.

    Args:
        rows: The rewards of each row's answers. A row without answers counts as 0. If rows have
            different numbers of answers, the smallest (not 0) is the largest k.

    Returns:
        By k, as text (JSON has no other keys); empty if a row has one answer.
    """
    most = min((len(rewards) for rewards in rows if rewards), default=0)
    ks = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return {
        str(k): fmean(best_of(rewards, k) if rewards else 0.0 for rewards in rows)
        for k in (*ks, most)
        if k > 1
    }
