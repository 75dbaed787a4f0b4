"""Tells whether two forms of answers say the same.

Forms of different kinds are different, and parts are compared in turn. Leaves are compared as exact
decimals where both are, else as expressions; words only as words.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction

from areal.rewards import math_expressions as expressions
from areal.rewards.math_forms import Form, is_name, read, region, squeezed, turned, words_of, wordy
from areal.rewards.math_tree import Node, TooCostly, Unreadable, parse, variables
from areal.rewards.math_units import Amount, compatible, shifted
from areal.rewards.math_verifier import verified

_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_BOUNDED = re.compile(r"\\(?:sin|cos)")
_MAX_UNORDERED = 8
_MAX_PLACES = 4000
# A decimal with that many digits may be the rounding of a root or a fraction.
_ROUNDED_DIGITS = 6


def same(gold: Form, found: Form) -> bool:
    """Whether two forms say the same.

    Raises:
        TooCostly: That cannot be told within bounded time.
    """
    if gold.kind == found.kind and squeezed(gold.text) == squeezed(found.text) and gold.text:
        return gold.kind != "clock" or not {gold.signs, found.signs} >= {"a", "p"}
    gold, found = _single(gold, found), _single(found, gold)
    left, right = region(gold), region(found)
    if left and right and (left[0] == right[0] or not left[0] or not right[0]):
        gold, found = left[1], right[1]
    if {gold.kind, found.kind} == {"list", "tuple"}:
        gold, found = _point(gold), _point(found)
    if {gold.kind, found.kind} == {"clock", "leaf"}:
        gold, found = _quotient(gold), _quotient(found)
    kinds = {gold.kind, found.kind}
    if "relation" in kinds:
        return _same_relation(gold, found)
    if kinds == {"leaf"}:
        return _same_leaf(gold, found)
    if kinds <= {"list", "set"} or kinds == {"union"}:
        return _same_items(gold.items, found.items)
    return (
        len(kinds) == 1
        and not kinds & {"base", "clock"}
        and gold.signs == found.signs
        and len(gold.items) == len(found.items)
        and all(map(same, gold.items, found.items))
    )


def _point(form: Form) -> Form:
    """The point that its coordinates are a list of, as in y = 3, x = 2."""
    values = {item.items[0].text: item.items[1] for item in form.items if item.signs == "="}
    named = all(name.isalpha() and len(name) == 1 for name in values)
    if form.kind != "list" or not named or len(values) < len(form.items) or " or " in form.text:
        return form
    return Form("tuple", form.text, tuple(values[name] for name in sorted(values)), signs="()")


def _quotient(form: Form) -> Form:
    """The fraction that is the value of a ratio in lowest terms, 3:2; whole numbers are none."""
    first, _, second = form.text.partition(":")
    if form.kind != "clock" or form.signs or not second.isdigit() or int(second) < 2:
        return form
    return read(f"{first}/{second}") if math.gcd(int(first), int(second)) == 1 else form


def _single(form: Form, other: Form) -> Form:
    """The element of a set of one, if it is compared with a number."""
    alone = form.kind == "set" and len(form.items) == 1 and other.kind == "leaf"
    return form.items[0] if alone else form


def _same_leaf(gold: Form, found: Form) -> bool:
    ours, theirs = gold.amount, found.amount
    if not compatible(ours.unit, theirs.unit):
        return False
    if ours.percent == theirs.percent:
        return _same_value(gold, found)
    if (theirs.unit if ours.percent else ours.unit) != "":
        return False
    # 50% is given for 50, and for one half; below 1% only the same spelling is the same number.
    percentage, other = (gold, found) if ours.percent else (found, gold)
    if squeezed(percentage.amount.core) == squeezed(other.amount.core):
        return True
    if percentage.value is not None and abs(percentage.value) >= 1 and _same_value(gold, found):
        return True
    return _same_value(
        _hundredth(gold) if ours.percent else gold, _hundredth(found) if theirs.percent else found
    )


def _hundredth(form: Form) -> Form:
    """A percentage as a number."""
    split = form.amount
    return Form(
        "leaf",
        form.text,
        amount=Amount(split.core, split.unit, False, split.shift - 2),
        value=None if form.value is None else shifted(form.value, -2),
    )


def _same_value(gold: Form, found: Form) -> bool:
    if gold.value is not None and found.value is not None:
        return gold.value == found.value
    ours, theirs = gold.amount, found.amount
    if ours.shift == theirs.shift and squeezed(ours.core) == squeezed(theirs.core) and ours.core:
        return True
    if wordy(ours.core) or wordy(theirs.core):
        return bool(words_of(gold.text)) and words_of(gold.text) == words_of(found.text)
    try:
        left, right = _node(gold), _node(found)
    except Unreadable:
        if "\\text" in ours.core + theirs.core or not ours.core or not theirs.core:
            return False
        return verified(ours.core, theirs.core) if ours.shift == theirs.shift else False
    return expressions.equal(left, right) or _rounds(gold, right) or _rounds(found, left)


def _node(form: Form) -> Node:
    if form.value is None:
        node = parse(form.amount.core)
        if not form.amount.shift:
            return node
        power = Node("number", str(Fraction(10) ** form.amount.shift))
        return Node("product", parts=(node, power))
    places = max(abs(form.value.adjusted()), len(form.value.as_tuple().digits))
    if places > _MAX_PLACES:
        raise TooCostly(f"a number with {places} places")
    return Node("number", str(Fraction(form.value)))


def _rounds(form: Form, node: Node) -> bool:
    """Whether a decimal with at least six digits is the rounding of a value that is no decimal."""
    value = form.value
    if value is None or len(value.as_tuple().digits) < _ROUNDED_DIGITS:
        return False
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or not -_MAX_PLACES < exponent < 0:
        return False
    fraction = expressions.exact(node)
    if fraction is not None and not _endless(fraction):
        return False
    return expressions.within(node, Fraction(value), Fraction(1, 2) / 10**-exponent)


def _endless(fraction: Fraction) -> bool:
    """Whether a fraction's decimal never ends."""
    below = fraction.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below != 1


def _same_items(gold: tuple[Form, ...], found: tuple[Form, ...]) -> bool:
    """Whether two collections have the same items, in any order."""
    if len(gold) != len(found):
        return False
    if all(each.value is not None and not each.amount.unit for each in (*gold, *found)):
        return Counter(each.value for each in gold) == Counter(each.value for each in found)
    if all(map(same, gold, found)):
        return True
    if len(gold) > _MAX_UNORDERED:
        return Counter(squeezed(g.text) for g in gold) == Counter(squeezed(f.text) for f in found)
    rest = list(found)
    for each in gold:
        match = next((i for i, other in enumerate(rest) if same(each, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _same_relation(gold: Form, found: Form) -> bool:
    if gold.kind != "relation":
        value = _defined(found)
        return value is not None and same(gold, value)
    if found.kind != "relation":
        value = _defined(gold)
        return value is not None and same(value, found)
    if set(gold.signs + found.signs) == {"="}:
        left, right = _defined(gold), _defined(found)
        names = gold.items[0].text, found.items[0].text
        if left is not None and right is not None and _alike(*names) and same(left, right):
            return True
        return len(gold.signs) == len(found.signs) == 1 and _same_residual(gold, found, False)
    return _same_inequality(gold, found)


def _alike(first: str, second: str) -> bool:
    """Whether two names may be of one thing: area and A, f(x) and y, but not a + b and a - b."""
    if squeezed(first) == squeezed(second) or "(" in first + second:
        return True
    if 1 in (len(first), len(second)):
        return len(first) != len(second)
    if wordy(first) or wordy(second):
        return True
    try:
        nodes = parse(first), parse(second)
    except Unreadable:
        return True
    # S_10 may be S; of sums, products and functions each is a name of its own.
    several = all(
        len(variables(node)) > 1 or _FUNCTION.match(name)
        for name, node in zip((first, second), nodes, strict=True)
    )
    return not several or expressions.equal(*nodes)


def _defined(form: Form) -> Form | None:
    """The value that an equation gives to a name, or to a calculation (20 - 2 = 18)."""
    if set(form.signs) != {"="}:
        return None
    *names, value = form.items
    if len(names) > 1 and is_name(names[0].text):
        return value  # V = \pi r^2 h = 3\pi
    if is_name(value.text) and len(names) == 1 and not is_name(names[0].text):
        names, value = [value], names[0]
    if value.value is not None and abs(value.value) > 1 and _BOUNDED.match(names[0].text):
        return None  # no sine is 3
    if all(is_name(each.text) or _is_calculation(each) for each in names):
        return value
    return None


def _is_calculation(form: Form) -> bool:
    if form.value is not None:
        return True
    try:
        node = parse(form.amount.core)
    except Unreadable:
        return False
    return not variables(node)


def _same_residual(gold: Form, found: Form, signed: bool) -> bool:
    """Whether two equations (signed: inequalities) have proportional differences of their sides."""
    try:
        sides = [_node(item) for item in (*gold.items, *found.items)]
    except Unreadable:
        return False
    left, right = (
        Node("sum", parts=(a, Node("minus", parts=(b,)))) for a, b in (sides[:2], sides[2:])
    )
    if variables(left) != variables(right) or not (variables(left)):
        return False
    return expressions.proportional(left, right, signed)


def _same_inequality(gold: Form, found: Form) -> bool:
    for form in (gold, turned(gold)):
        if form is not None and form.signs == found.signs:
            if all(map(same, form.items, found.items)):
                return True
            if (
                len(form.signs) == 1
                and form.signs in "<>≤≥"
                and all(item.kind == "leaf" for item in (*form.items, *found.items))
                and _same_residual(form, found, True)
            ):
                return True
    return False
