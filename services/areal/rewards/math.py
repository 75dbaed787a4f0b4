r"""Scores whether a completion's final answer is mathematically equal to the right one.

completion ── last \boxed{...}, else after "####", else what it states (final_answer.py) ──> text
text ── one spelling for each sign (math_text.py) ── a form (math_forms.py)
a form and the right one ── part by part (math_same.py) ──> equal or not
numbers: exact decimals and fractions; expressions: at random points (math_expressions.py);
sums, integrals and the like: math-verify, in a child with a limit on its time (math_verifier.py)
"""

from __future__ import annotations

import logging
import math
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from areal.errors import InvalidInput
from areal.rewards.boxed import last_boxed
from areal.rewards.final_answer import final_answer
from areal.rewards.math_forms import Form, readings, squeezed
from areal.rewards.math_same import same
from areal.rewards.math_text import clean, trimmed, undelimited
from areal.rewards.math_tree import TooCostly
from areal.rewards.math_units import literal
from areal.rewards.math_verifier import is_beyond, verified
from areal.types import TIMEOUTS, Score

_MAX_CHARS = 4000
_FLOAT_TOLERANCE = 1e-12


def math_reward(completion: str, answer: str | float | Decimal | Fraction) -> float:
    r"""Returns 1.0 if the completion's final answer equals `answer` mathematically, else 0.0.

    The final answer is the content of the last ``\boxed{}``. Without one, it is the text after the
    last ``####``. Without either, it is what the text states as its answer, or else the last number
    of its last sentence with a number. Units, words and signs beside the number are read as such.
    If the answer is too costly to judge, such as a tower of powers, the result is 0.0 with the part
    `timeouts`, which counts in the metric `reward/timeouts`.

    Args:
        completion: The model's text.
        answer: The right answer: a number or LaTeX, with or without ``$`` or ``\boxed{}``. A float
            is compared to 12 digits, everything else exactly.

    Raises:
        InvalidInput: `answer` is empty, or is neither text nor a finite number.

    Example:
        >>> math_reward("so it is \\boxed{\\frac{2}{4}}", "0.5")
        1.0
    """
    gold = _gold_text(answer)
    try:
        return float(_judged(gold, final_answer(completion), answer))
    except (TooCostly, RecursionError) as reason:
        logging.getLogger("areal.rewards.math").warning("answer scored 0: %s", reason)
        return Score(0.0, {TIMEOUTS: 1.0})


def _judged(gold: str, found: str, answer: object) -> bool:
    found = trimmed(undelimited(found.strip()))
    if not found or squeezed(found) == squeezed(gold):
        return bool(found)
    if max(len(found), len(gold)) > _MAX_CHARS:
        plain = literal(found), literal(gold)
        if None in plain:
            raise TooCostly(f"an answer of {len(found)} characters")
        return plain[0] == plain[1]
    forms, rights = readings(clean(found)), _gold(gold)
    beyond = is_beyond(found) or is_beyond(gold)
    if beyond:  # math-verify may take its whole time: it is asked once
        forms, rights = forms[:1], rights[:1]
        if any(form.kind != "leaf" and set(form.signs) != {"="} for form in (*forms, *rights)):
            return verified(gold, found)  # as a whole: one by one, each might take its whole time
    is_float = isinstance(answer, float) and any(_is_float(form, answer) for form in forms)
    if is_float or any(same(right, form) for right in rights for form in forms):
        return True
    # Our grammar reads d/dx and the gamma function as products of letters.
    return beyond and verified(gold, found)


@lru_cache(maxsize=4096)
def _gold(gold: str) -> list[Form]:
    """The samples of a group share one answer: it is read once."""
    return readings(clean(gold), gold=True)


def _gold_text(answer: object) -> str:
    """The right answer as text; numbers in full, without an exponent where they are moderate."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal | Fraction):
        raise InvalidInput(f"answer {answer!r}: expected text or a number")
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        raise InvalidInput(f"answer {answer!r}: expected text or a finite number")
    if isinstance(answer, float):
        return str(Decimal(repr(float(answer))))
    if isinstance(answer, int):
        return str(Decimal(answer))  # str(int) refuses more than 4300 digits
    text = str(answer)
    if isinstance(answer, str):
        boxed = last_boxed(text)
        text = trimmed(undelimited((boxed if boxed is not None else _unmarked(text)).strip()))
        if not text:
            raise InvalidInput(f"answer {answer!r}: expected text or a number")
    return text


def _unmarked(text: str) -> str:
    """Returns what follows GSM8K's mark; the working is before it."""
    _, mark, tail = text.rpartition("####")
    return tail if mark else text


def _is_float(form: Form, answer: float) -> bool:
    return (
        form.value is not None
        and not form.amount.unit
        and math.isclose(float(form.value), answer, rel_tol=_FLOAT_TOLERANCE)
    )
