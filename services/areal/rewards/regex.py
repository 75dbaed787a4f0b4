"""Scores whether a completion matches a pattern."""

from __future__ import annotations

import re
from functools import lru_cache

from areal.errors import InvalidInput


def regex_reward(
    completion: str, pattern: str, answer: str | None = None, fullmatch: bool = False
) -> float:
    r"""Returns 1.0 when `pattern` is found in the completion, else 0.0.

    With a group named `answer` in the pattern, the text it captures must also equal the row's
    `answer` (spaces around both are ignored). A pattern that backtracks forever is ended by the
    worker's time limit, like any other reward function.

    Args:
        completion: The model's text.
        pattern: A Python regular expression.
        answer: The right answer, where the pattern has a group `answer`.
        fullmatch: The whole completion must match.

    Raises:
        InvalidInput: The pattern is not a regular expression, or its group `answer` has nothing
            to be compared with.

    Example:
        >>> regex_reward("<answer>42</answer>", r"<answer>(?P<answer>\d+)</answer>", "42")
        1.0
    """
    compiled = _compile(pattern)
    found = compiled.fullmatch(completion) if fullmatch else compiled.search(completion)
    wants_answer = "answer" in compiled.groupindex
    if wants_answer and answer is None:
        raise InvalidInput("pattern has a group 'answer', but the row has no field 'answer'")
    if found is None:
        return 0.0
    if not wants_answer:
        return 1.0
    return float((found["answer"] or "").strip() == str(answer).strip())


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidInput(f"pattern {pattern!r}: not a regular expression ({error})") from None
