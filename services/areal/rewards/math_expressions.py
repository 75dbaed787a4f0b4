r"""Compares two expressions in LaTeX or plain text, within bounded time.

text ── tokens ── tree ── exact, as fractions ─────────────────────> equal or not
                      └── else at random points, with 50 digits ───> equal or not

Nothing is simplified or expanded, so the time depends on the size of the text alone: no number gets
more digits than `_MAX_BITS`, and a value whose digits cannot be computed raises `TooCostly`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from areal.errors import CannotStart
from areal.rewards.math_tree import INFINITY, Node, TooCostly, variables

try:
    import mpmath
except ModuleNotFoundError:  # rollout workers import recipes, too, and score nothing
    mpmath = None

_MAX_BITS = 20_000
# Numbers are 2 to the power of at most 2 to the power of this.
_MAX_MAGNITUDE = 64
_DIGITS = 50
_RELATIVE = "1e-30"
_POINTS = 3


class _Inexact(Exception):
    """A value is not a fraction of moderate size."""


def exact(node: Node) -> Fraction | None:
    """The value as a fraction; None if it has variables or roots, or too many digits."""
    try:
        return _fraction(node)
    except (_Inexact, ZeroDivisionError):
        return None


def equal(left: Node, right: Node) -> bool:
    """Whether two expressions have the same value for all values of their variables.

    Raises:
        TooCostly: A value cannot be computed within bounded time.
    """
    if left == right:
        return True
    if INFINITY in variables(left) | variables(right):
        return False  # it equals itself, and calculations with it have no value
    first, second = exact(left), exact(right)
    if first is not None and second is not None:
        return first == second
    _check_installed()
    names = sorted(variables(left) | variables(right))
    agreed = 0
    for point in range(_POINTS if names else 1):
        values = _values(names, point)
        ours, theirs = _numeric(left, values), _numeric(right, values)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            return False
        if not _close(left, right, values, ours, theirs):
            return False
        agreed += 1
    return agreed > 0


def proportional(left: Node, right: Node, signed: bool = False) -> bool:
    """Whether two expressions differ only by a constant factor (`signed`: a positive one)."""
    _check_installed()
    names = sorted(variables(left) | variables(right))
    if INFINITY in names:
        return False
    ratios = []
    for point in range(_POINTS + 1):
        values = _values(names, point)
        ours, theirs = _numeric(left, values), _numeric(right, values)
        if not ours or not theirs:
            return False
        with mpmath.workdps(_DIGITS):
            ratios.append(ours / theirs)
    with mpmath.workdps(_DIGITS):
        same = all(abs(r - ratios[0]) <= mpmath.mpf(_RELATIVE) * abs(r) for r in ratios[1:])
        return same and (not signed or (not mpmath.im(ratios[0]) and mpmath.re(ratios[0]) > 0))


def within(node: Node, center: Fraction, distance: Fraction) -> bool:
    """Whether an expression without variables is real and that close to a number."""
    _check_installed()
    value = None if variables(node) else _numeric(node, {})
    if value is None or mpmath.im(value):
        return False
    with mpmath.workdps(_DIGITS):
        middle = mpmath.mpf(center.numerator) / center.denominator
        far = mpmath.mpf(distance.numerator) / distance.denominator
        return bool(abs(value - middle) <= far)


def _check_installed() -> None:
    if mpmath is None:
        raise CannotStart(
            "reward math: the package math-verify is not installed; "
            "pip install 'areal-services[reward]'"
        )


def _fraction(node: Node) -> Fraction:
    if node.kind == "number":
        return _number(node.name)
    if node.kind in ("name", "constant", "function", "degrees"):
        raise _Inexact
    first, *rest = (_fraction(part) for part in node.parts)
    if node.kind in ("factorial", "binomial"):
        return _fraction_factorial(first, *rest)
    if node.kind in ("power", "root"):
        return _fraction_power(first, rest[0] if node.kind == "power" else 1 / rest[0])
    if node.kind in ("sum", "product"):
        for other in rest:
            if _bits(first) + _bits(other) > _MAX_BITS // 2:
                raise _Inexact
            first = first + other if node.kind == "sum" else first * other
        return first
    if node.kind == "inverse":
        return 1 / first
    return -first if node.kind == "minus" else first / 100


def _fraction_factorial(*numbers: Fraction) -> Fraction:
    if not all(number.denominator == 1 and 0 <= number <= 400 for number in numbers):
        raise _Inexact
    whole = [int(number) for number in numbers]
    return Fraction(math.comb(*whole) if len(whole) == 2 else math.factorial(whole[0]))


def _fraction_power(base: Fraction, exponent: Fraction) -> Fraction:
    if base in (0, 1) and exponent >= 0:
        return base if exponent else Fraction(1)
    if exponent.denominator == 1:
        if abs(exponent) * max(_bits(base), 1) > _MAX_BITS:
            raise _Inexact
        return base ** int(exponent)
    if exponent.denominator == 2 and base > 0 and abs(exponent) < 100:
        above, below = math.isqrt(base.numerator), math.isqrt(base.denominator)
        if above * above == base.numerator and below * below == base.denominator:
            return _fraction_power(Fraction(above, below), Fraction(exponent.numerator))
    raise _Inexact


def _number(text: str) -> Fraction:
    fixed, mark, repeating = text.partition("~")
    value = Fraction(fixed.removesuffix("."))
    if mark:
        places = len(fixed.partition(".")[2])
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10**places)
    return value


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length() - 1


def _values(names: list[str], point: int) -> dict[str, Any]:
    """Returns values of the variables at one point; the second point has negative ones."""
    values = {}
    for name in names:
        draw = random.Random(f"{point} {name}")  # noqa: S311 - points, not secrets
        sign = -1 if point == 1 and draw.random() < 0.7 else 1
        values[name] = sign * mpmath.mpf(draw.randint(2000, 30000)) / 9973
    return values


def _close(left: Node, right: Node, values: dict[str, Any], ours: Any, theirs: Any) -> bool:
    """Whether two values agree to 30 digits; a difference that vanishes with precision is 0."""
    with mpmath.workdps(_DIGITS):
        gap, largest = abs(ours - theirs), max(abs(ours), abs(theirs))
        if gap <= mpmath.mpf(_RELATIVE) * largest:
            return True
        if gap > mpmath.mpf(_RELATIVE) or (ours and theirs and abs(ours) + abs(theirs) > 2 * gap):
            return False
    finer = [_numeric(node, values, 2 * _DIGITS) for node in (left, right)]
    if None in finer:
        return False
    with mpmath.workdps(_DIGITS):
        return bool(abs(finer[0] - finer[1]) < gap * mpmath.mpf("1e-40"))


def _numeric(node: Node, values: dict[str, Any], digits: int = _DIGITS) -> Any:
    """The value as a number of mpmath; None where it is not defined.

    Raises:
        TooCostly: It would have too many digits.
    """
    with mpmath.workdps(digits):
        try:
            value = _evaluate(node, values)
        except (ZeroDivisionError, ValueError, ArithmeticError, mpmath.libmp.NoConvergence):
            return None
        return value if mpmath.isfinite(value) else None


def _evaluate(node: Node, values: dict[str, Any]) -> Any:
    if node.kind == "number":
        value = _number(node.name)
        return mpmath.mpf(value.numerator) / value.denominator
    if node.kind == "name":
        return values[node.name]
    if node.kind == "constant":
        return {"\\pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1)}[node.name]
    parts = [_moderate(_evaluate(part, values)) for part in node.parts]
    if node.kind == "function":
        return _call(node.name, parts[0])
    return _OPERATIONS[node.kind](parts)


def _sum(parts: list[Any]) -> Any:
    return mpmath.fsum(parts)


def _product(parts: list[Any]) -> Any:
    return mpmath.fprod(parts)


def _factorial(parts: list[Any]) -> Any:
    if any(mpmath.mag(part) > 40 for part in parts if part):
        raise TooCostly("a factorial of a large number")
    return mpmath.factorial(*parts) if len(parts) == 1 else mpmath.binomial(*parts)


def _power(parts: list[Any]) -> Any:
    base, exponent = parts
    if not base or not exponent:
        return base**exponent
    if mpmath.mag(exponent) + mpmath.mag(abs(mpmath.mag(base)) + 2) > _MAX_MAGNITUDE:
        raise TooCostly("a power with too many digits")
    return base**exponent


def _root(parts: list[Any]) -> Any:
    """The root of a number; that of a negative one is real if the degree is odd."""
    base, degree = parts
    if not mpmath.im(base) and mpmath.re(base) < 0 and mpmath.isint((degree + 1) / 2):
        return -_power([-base, 1 / degree])
    return _power([base, 1 / degree])


def _call(name: str, argument: Any) -> Any:
    if argument and mpmath.mag(argument) > _MAX_MAGNITUDE and name not in ("ln", "lg", "fabs"):
        raise TooCostly(f"{name} of a large number")
    if name == "lg":
        return mpmath.log10(argument)
    return getattr(mpmath, name)(argument)


def _moderate(value: Any) -> Any:
    """Refuses what would need a longer exponent than one word."""
    if value and mpmath.isfinite(value) and abs(mpmath.mag(value)) > 1 << _MAX_MAGNITUDE:
        raise TooCostly("a number with too many digits")
    return value


_OPERATIONS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": _sum,
    "product": _product,
    "minus": lambda parts: -parts[0],
    "inverse": lambda parts: 1 / parts[0],
    "percent": lambda parts: parts[0] / 100,
    "degrees": lambda parts: parts[0] * mpmath.pi / 180,
    "power": _power,
    "root": _root,
    "factorial": _factorial,
    "binomial": _factorial,
}
