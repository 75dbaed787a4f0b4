"""Scores the letter that a completion chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from areal.errors import InvalidInput
from areal.rewards.boxed import last_boxed

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Finds the B of: answer is (B); Answer: **B**; the correct option is B; choose (b).
_STATED = re.compile(
    r"\b(?i:answer|option|choice|choose)\b(?i:\s+(?:is|was))?\s*[:=]?\s*[\(\[\*\"'$]*"
    r"([A-Z](?![A-Za-z'])|(?<=[\(\[\*])[a-z](?=[\)\]\*]))"
)
_ALONE = re.compile(r"(?<![A-Za-z'])[\(\[\*]*([A-Z])[\)\]\*]*(?![A-Za-z'])")


def multiple_choice_reward(
    completion: str, answer: str | int, choices: Sequence[Any] | None = None
) -> float:
    r"""Returns 1.0 if the completion chooses the right letter, else 0.0.

    The chosen letter is the content of the last ``\boxed{}``. Without one, it is the last letter
    that the text states as the answer ("the answer is (B)"). Without either, it is the last capital
    letter that stands alone.

    Args:
        completion: The model's text.
        answer: The right letter, or its index, counted from 0.
        choices: The options, in order. If given, only the letters of these options count.

    Raises:
        InvalidInput: `answer` is neither a letter nor an index, or is not one of the `choices`.

    Example:
        >>> multiple_choice_reward("A is wrong, so the answer is (B).", "B")
        1.0
    """
    allowed = _LETTERS[: len(choices)] if choices else _LETTERS
    right = _letter(answer)
    if right not in allowed:
        raise InvalidInput(f"answer {answer!r}: expected a letter from A to {allowed[-1]}")
    return float(chosen_letter(completion, allowed) == right)


def chosen_letter(completion: str, allowed: str = _LETTERS) -> str | None:
    """The letter that a completion settles on; None when it names none of those allowed."""
    boxed = last_boxed(completion)
    if boxed is not None:
        found = _ALONE.findall(re.sub(r"\\text\{([^{}]*)\}", r"\1", boxed).upper())
        return found[-1] if found and found[-1] in allowed else None
    for pattern in (_STATED, _ALONE):
        letters = [m.upper() for m in pattern.findall(completion) if m.upper() in allowed]
        if letters:
            return str(letters[-1])
    stripped = completion.strip().rstrip(".").upper()
    return stripped if len(stripped) == 1 and stripped in allowed else None


def _letter(answer: str | int) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(_LETTERS):
        return _LETTERS[answer]
    if isinstance(answer, str):
        text = answer.strip().strip("()").upper()
        if len(text) == 1 and text in _LETTERS:
            return text
    raise InvalidInput(f"answer {answer!r}: expected a letter, or its index from 0")
