"""Pairs of answers, one of them preferred: a task that a tiny model learns within a minute."""

from __future__ import annotations

import random
from typing import Any

from areal.errors import InvalidInput

_MOST = 5000  # of 10 * 9 * 8 * 7 prompts
GENERATED = "generated"
"""Value of `train_dataset.path` with which the examples generate these rows."""


def sorted_digits(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows that ask the model to sort four digits, with a sorted and an unsorted answer.

    The rows are for `pair_unit`: `chosen` has the digits in order, and `rejected` does not.

    Args:
        count: Number of rows, 1 to 5000; no prompt is repeated.
        seed: Random seed.

    Raises:
        InvalidInput: `count` is out of range.

    Example:
        >>> sorted_digits(1, seed=0)[0]
        {'prompt': '9425', 'chosen': '2459', 'rejected': '9542'}
    """
    if not 0 < count <= _MOST:
        raise InvalidInput(f"sorted_digits(count={count}): expected 1 to {_MOST}")
    generator = random.Random(f"digits:{seed}")  # noqa: S311 - problems, not secrets
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        digits = generator.sample("0123456789", 4)
        wrong = generator.sample(digits, 4)
        right = sorted(digits)
        if wrong != right:
            prompt = "".join(digits)
            rows[prompt] = {
                "prompt": prompt,
                "chosen": "".join(right),
                "rejected": "".join(wrong),
            }
    return list(rows.values())
