"""Scores whether a completion matches a pattern."""

from __future__ import annotations

import re
from functools import lru_cache

from areal.errors import InvalidInput


def regex_reward(
    completion: str, pattern: str, answer: str | None = None, fullmatch: bool = False
) -> float:
    r"""Returns 1.0 if the completion matches `pattern`, else 0.0.

    If the pattern has a group named `answer`, the captured text must also equal the row's `answer`,
    apart from whitespace at either end.

    Args:
        completion: The model's text.
        pattern: A Python regular expression. If it backtracks too long, the reward's time limit
            stops it.
        answer: The right answer. Required if the pattern has a group `answer`, otherwise ignored.
        fullmatch: Whether the whole completion must match. If False, any part of it may match.

    Raises:
        InvalidInput: The pattern is not a regular expression, or it has a group `answer` and
            the argument `answer` is missing.

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
