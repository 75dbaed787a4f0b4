r"""Scores whether a completion's final answer is mathematically equal to the right one.

completion ── last \boxed{...}, else text after the last "####", else all of it ──> candidate
candidate == answer as normalized text ──────────────────────────────> 1
both are plain numbers ── compare as numbers ────────────────────────> 1 or 0
otherwise ── math-verify (sympy), about a millisecond ───────────────> 1 or 0
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from areal.errors import CannotStart, InvalidInput
from areal.rewards.boxed import last_boxed

try:
    import math_verify
except ModuleNotFoundError:  # rollout workers import recipes, too, and score nothing
    math_verify = None

_PLAIN_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WRAPPERS = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")


def math_reward(completion: str, answer: str | float) -> float:
    r"""Returns 1.0 if the completion's final answer equals `answer` mathematically, else 0.0.

    The final answer is the content of the last ``\boxed{}``. Without one, it is the text after the
    last ``####``. Without either, it is the last expression that the package math-verify finds.

    Args:
        completion: The model's text.
        answer: The right answer: a number or LaTeX, with or without ``$`` or ``\boxed{}``.

    Raises:
        InvalidInput: `answer` is empty, or is neither text nor a number.

    Example:
        >>> math_reward("so it is \\boxed{\\frac{2}{4}}", "0.5")
        1.0
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise InvalidInput(f"answer {answer!r}: expected text or a number")
    gold = final_answer(str(answer))
    if not gold.strip():
        raise InvalidInput("answer '': expected text or a number")
    candidate = final_answer(completion)
    gold_text, candidate_text = normalize(gold), normalize(candidate)
    if candidate_text == gold_text:
        return 1.0
    if _PLAIN_NUMBER.fullmatch(candidate_text) and _PLAIN_NUMBER.fullmatch(gold_text):
        return float(Decimal(candidate_text) == Decimal(gold_text))
    found = candidate if candidate is completion else f"\\boxed{{{candidate}}}"
    return float(_verify(gold, found))


def final_answer(text: str) -> str:
    r"""Content of the last ``\boxed{}``, else what follows the last ``####``, else the text."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else text


def normalize(text: str) -> str:
    """Returns text for the fast path: no spaces, dollars, thousands separators, final period."""
    text = _WRAPPERS.sub(r"\1", text.strip().strip("$"))
    text = text.replace("\\!", "").replace("\\,", "").replace("\\$", "").replace("dfrac", "frac")
    return _THOUSANDS.sub("", "".join(text.split())).removesuffix(".")


def _verify(gold: str, found: str) -> bool:
    # Timeouts of math-verify need the main thread's alarm; the worker's own limit covers this.
    parsed = _parser()(found, parsing_timeout=None)
    return bool(math_verify.verify(_gold(gold), parsed, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(gold: str) -> list[Any]:
    """The samples of a group share one answer: it is parsed once."""
    return list(_parser()(f"\\boxed{{{gold.strip().strip('$')}}}", parsing_timeout=None))


@lru_cache(maxsize=1)
def _parser() -> Callable[..., list[Any]]:
    if math_verify is None:
        raise CannotStart(
            "reward math: the package math-verify is not installed; "
            "pip install 'areal-services[reward]'"
        )
    # It warns, once per process, that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse: Callable[..., list[Any]] = math_verify.parse
    return parse
