"""Compares expressions beyond our own grammar (sums, integrals) with math-verify, in a child.

The child is a fork of this process that the kernel ends after `_CPU_S` of CPU time: neither sympy
nor the calls to C in it could be ended otherwise, in whichever thread they run.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
from functools import lru_cache

from areal.chassis.process import signal_name
from areal.errors import CannotStart
from areal.rewards.math_tree import TooCostly

try:
    import math_verify
except ModuleNotFoundError:  # rollout workers import recipes, too, and score nothing
    math_verify = None

_CPU_S = 0.5
_WALL_S = 5.0
_MAX_CHARS = 300
_BEYOND = re.compile(
    r"\\(?:sum|prod|i{0,2}int|oint|lim|[bp]?mod|max|min|gcd|lcm|det|dim|partial|nabla|cap|setminus)"
    r"(?![A-Za-z])|\\Gamma\s*(?:\\left)?\(|\\d?frac\s*\{\s*d\s*\}\s*\{\s*d"
)
"""Forms that our own grammar lacks and math-verify reads."""
_WARM = (r"\int_0^1 x^2 dx", r"\sum_{k=1}^{3} \frac{k}{2}", r"\lim_{x \to 0} \sin(x)+\sqrt{2}")


def is_beyond(text: str) -> bool:
    """Whether a text has a sum, an integral or another sign that only math-verify reads."""
    return bool(_BEYOND.search(text))


@lru_cache(maxsize=1024)
def verified(gold: str, found: str) -> bool:
    """Whether math-verify finds two expressions equal.

    Raises:
        TooCostly: The texts are long, or half a second of CPU time was not enough.
        CannotStart: math-verify is not installed.
    """
    if not is_beyond(gold) and not is_beyond(found):
        return False
    if max(len(gold), len(found)) > _MAX_CHARS:
        raise TooCostly(f"an expression of {max(len(gold), len(found))} characters")
    _warm_up()
    said, crash = _asked(gold, found)
    if crash:  # a fork of a process with many threads can fail in some library's handler
        logging.getLogger("areal.rewards.math").warning(
            "math-verify's process was ended by %s; asking another", crash
        )
        said, crash = _asked(gold, found)
    if crash:
        raise TooCostly("an expression that math-verify crashed on, twice")
    if not said:
        raise TooCostly(f"an expression that takes more than {_CPU_S:g} s")
    return said == b"1"


def _asked(gold: str, found: str) -> tuple[bytes, str]:
    """What a child says, nothing if it did not end in time; and the signal that it crashed by."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, _verdict(gold, found))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        select.select([reading], [], [], _WALL_S)
        os.set_blocking(reading, False)
        try:
            said = os.read(reading, 1)
        except BlockingIOError:
            said = b""
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if said or ended_by in (0, signal.SIGKILL, signal.SIGPROF):
        return said, ""
    return said, signal_name(ended_by)


def _verdict(gold: str, found: str) -> bytes:
    """Runs in the child, which the kernel's timer ends, whatever code runs."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    logging.disable()
    try:
        sides = [math_verify.parse(f"\\boxed{{{s}}}", parsing_timeout=None) for s in (gold, found)]
        # A side that math-verify reads as text only, or as several things, is no expression.
        if any(len(side) != 2 or isinstance(side[0], str) for side in sides):
            return b"0"
        equal = math_verify.verify(sides[0][:1], sides[1][:1], timeout_seconds=None)
    except MemoryError:
        return b""
    except Exception:  # sympy's own, about a text that it cannot handle
        return b"0"
    return b"1" if equal else b"0"


@lru_cache(maxsize=1)
def _warm_up() -> None:
    """Fills the parser's tables in this process, so that each child has them."""
    if math_verify is None:
        raise CannotStart(
            "reward math: the package math-verify is not installed; "
            "pip install 'areal-services[reward]'"
        )
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for text in _WARM:
        math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)
