"""Decides whether an exception that left the recipe's `main` would come again after a restart."""

from __future__ import annotations

import traceback
from pathlib import Path

from areal.errors import ArealError

_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""Errors of a recipe: the same code with the same data raises them again."""
_PASSING = (ConnectionError, TimeoutError, MemoryError, BlockingIOError, InterruptedError)


def fault_of_recipe(error: BaseException, recipe: Path) -> str:
    """Returns one line, with the place, for an error that comes again after a restart; else "".

    That is a mistake in code (KeyError, ImportError, a wrong type ...), and every other exception
    that the recipe's own file raised. Not: what services report (they may come back), and what
    torch, the network or the disk raise below the recipe.
    """
    if isinstance(error, BaseExceptionGroup):
        lines = [fault_of_recipe(each, recipe) for each in error.exceptions]
        return lines[0] if all(lines) else ""
    if isinstance(error, (ArealError, *_PASSING)) or type(error).__module__.startswith("torch"):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _same(frame.filename, recipe)]
    raised_there = bool(own) and frames[-1] is own[-1]
    if not (raised_there or isinstance(error, _MISTAKES)):
        return ""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:800]
    if not frames:
        return said
    place = (own or frames)[-1]
    return f"{said} ({place.filename}:{place.lineno})"


def _same(filename: str, recipe: Path) -> bool:
    """Whether a file is the recipe, or is in its folder."""
    return any(
        file.is_relative_to(own)
        for file, own in ((Path(filename), recipe), (Path(filename).resolve(), recipe.resolve()))
    )
