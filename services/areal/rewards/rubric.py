"""A reward of several parts."""

from __future__ import annotations

import math
from typing import Any

from areal.errors import InvalidInput
from areal.types import SPLITS, TIMEOUTS, Score

# A metric of that name is there already.
_TAKEN = ("mean", "std", TIMEOUTS, SPLITS)


def rubric(**parts: Any) -> Score:
    """Returns a reward that is the weighted sum of named parts.

    The mean of each part, before weighting, becomes the metric `reward/NAME`.

    Args:
        parts: NAME=number or NAME=(number, weight); the default weight is 1.

    Raises:
        InvalidInput: There are no parts, a number or weight is not finite, or a part is named
            `mean`, `std`, `timeouts` or `splits` (the metrics `reward/mean` and so on already
            exist).

    Example:
        >>> rubric(correct=True, short=(0.5, 0.2))
        1.1
    """
    if not parts:
        raise InvalidInput("rubric: expected at least one part")
    values: dict[str, float] = {}
    timeouts: dict[str, float] = {}
    total = 0.0
    for name, part in parts.items():
        if name in _TAKEN:
            raise InvalidInput(f"rubric {name}: expected another name: reward/{name} is taken")
        value, weight = part if isinstance(part, tuple) and len(part) == 2 else (part, 1.0)
        try:
            values[name], weight = float(value), float(weight)
        except (TypeError, ValueError):
            values[name] = math.nan
        if not (math.isfinite(values[name]) and math.isfinite(weight)):
            raise InvalidInput(
                f"rubric {name} {part!r}: expected a finite number, or (number, weight)"
            )
        total += weight * values[name]
        if isinstance(value, Score) and TIMEOUTS in value.parts:  # of a built-in reward
            timeouts[TIMEOUTS] = 1.0
    return Score(total, values | timeouts)
