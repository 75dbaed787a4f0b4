"""Addition problems: a task that a tiny model learns within minutes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from areal.errors import InvalidInput

# Up to here all pairs are listed and shuffled; above, pairs are drawn until enough differ.
_LISTABLE_DIGITS = 2


def addition(
    digits: int, *, train: int, heldout: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns random addition problems, as training rows and held-out rows.

    No held-out problem is a training problem with its operands swapped. The same arguments give the
    same rows.

    Args:
        digits: Number of digits of each operand, without leading zeros; 1 means 0 to 9.
        train: Number of training rows.
        heldout: Number of held-out rows.
        seed: Random seed of the problems, their split and their order.

    Returns:
        (training rows, held-out rows), for `RLVRWorkflow` with the reward "math".

    Raises:
        InvalidInput: `digits` is below 1, a count is negative, or there are not enough different
            problems.

    Example:
        >>> addition(2, train=2, heldout=1, seed=0)[0][0]
        {'messages': [{'role': 'user', 'content': '94+27='}], 'answer': '121'}
    """
    if digits < 1 or train < 0 or heldout < 0:
        raise InvalidInput(
            f"addition(digits={digits}, train={train}, heldout={heldout}): expected digits >= 1 "
            f"and no negative counts"
        )
    low, high = (0, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    size = high - low + 1
    if train + heldout > size * size:
        raise InvalidInput(
            f"addition: train + heldout = {train + heldout}, but there are only {size * size} "
            f"{digits}-digit problems"
        )
    generator = random.Random(f"addition:{digits}:{seed}")  # noqa: S311 - problems, not secrets
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    pairs = _unordered_pairs(low, high, digits, generator)
    # The held-out part first: it stays the same when more training rows are asked for.
    for part, count in ((parts[1], heldout), (parts[0], train)):
        while len(part) < count:
            pair = next(pairs, None)
            if pair is None:
                raise InvalidInput(
                    f"addition: {train} train and {heldout} heldout rows do not fit into the "
                    f"{size * size} {digits}-digit problems without sharing one; ask for fewer"
                )
            for a, b in dict.fromkeys((pair, pair[::-1])):
                if len(part) < count:
                    part.append(_row(a, b))
        generator.shuffle(part)
    return parts


def _unordered_pairs(
    low: int, high: int, digits: int, generator: random.Random
) -> Iterator[tuple[int, int]]:
    """Yields each unordered pair at most once, in random order, operands in random order."""
    if digits <= _LISTABLE_DIGITS:
        listed = [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]
        generator.shuffle(listed)
        for a, b in listed:
            yield (a, b) if generator.random() < 0.5 else (b, a)
        return
    seen: set[tuple[int, int]] = set()
    size = high - low + 1
    while len(seen) < size * (size + 1) // 2:
        pair = (generator.randint(low, high), generator.randint(low, high))
        key = (min(pair), max(pair))
        if key not in seen:
            seen.add(key)
            yield pair


def _row(a: int, b: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}
