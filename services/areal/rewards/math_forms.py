"""Reads a cleaned answer as a form (a number, list, interval, equation, word), and compares forms.

    text ──> split at its outermost signs ──> list, tuple, set, union, matrix, relation
         └── nothing to split at ──> leaf: an expression with a unit, or words

Forms of different kinds are different, and parts are compared in turn. Leaves are compared as exact
decimals where both are, else as expressions; words only as words.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction

from areal.rewards import math_expressions as expressions
from areal.rewards.math_text import NEW_ROW
from areal.rewards.math_tree import (
    GREEK,
    INFINITY,
    Node,
    TooCostly,
    Unreadable,
    names_in,
    parse,
    variables,
)
from areal.rewards.math_units import Amount, amount, compatible, literal, shifted
from areal.rewards.math_verifier import verified

_MAX_UNORDERED = 8
_MAX_NESTED = 20
_MAX_PLACES = 4000
# A decimal with that many digits may be the rounding of a root or a fraction.
_ROUNDED_DIGITS = 6

_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "⟨": "⟩"}
_BRACKET = re.compile(r"\\[{}]|[()\[\]{}⟨⟩]")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_SEPARATOR = re.compile(r",\s*(?:and|or)\b|[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_COMMA = re.compile(",")
_UNION = re.compile("∪")
_RELATION = re.compile(r"[=<>≤≥≠∈]")
_BASE = re.compile(
    r"\(?(-?[0-9A-Fa-f]+)\)?\s*_\s*\{?\s*(\d{1,2}|two|three|eight|ten|sixteen)\s*\}?"
    r"|(-?[0-9A-Fa-f]+) ?\(?(?:in )?base (\d{1,2}|two|three|eight|ten|sixteen)\)?"
)
_BASES = {"two": "2", "three": "3", "eight": "8", "ten": "10", "sixteen": "16"}
_CLOCK = re.compile(r"(\d{1,9}(?: ?: ?\d{1,9})+)\s*(?:([AaPp])\.? ?[Mm]\.?)?")
# A set, a segment, a vector or a complex number; |x| = 3 says nothing like x = 3.
_SIZED = r"(?:[A-Z][A-Za-z]*|[uvwz]|\\vec ?\{?[A-Za-z]+\}?)"
_LABEL = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w{1,9}\}?)?'*(?:\([^()=]{0,20}\))?"
    r"|\([a-z](?:, ?[a-z]){1,3}\)|[A-Z]{2,4}"
    r"|m?\\(?:angle|overline|bar|hat|vec|triangle|widehat|\|)[^0-9=]*"
    rf"|\| ?{_SIZED} ?\||\\[lv]vert ?{_SIZED} ?\\[rv]vert"
    r"|[A-Za-z]'*(?: ?[-+*]? ?[A-Za-z]){1,5}"
    rf"|{GREEK}(?: ?[-+]? ?{GREEK}){{1,5}}"
    r"|§?[A-Za-z][A-Za-z' §]*"
)
_REALS = ("\\mathbb{R}", "\\mathbbR")
# A set by its condition: {x | 0 < x < 1}, {x : x < 0 or x > 1}.
_BUILDER = re.compile(
    r"\\\{ ?(\w+) ?(?:∈ ?\\mathbb\{R\} ?)?(?:\||:|\\(?:mid|vert)(?![A-Za-z])) ?(.*)\\\}"
)
_REVERSED = {"<": ">", "≤": "≥", "=": "=", "≠": "≠"}
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
_AND_FRACTION = re.compile(r"(-?\d{1,9}) and (?:\\frac\{)?(\d{1,4})(?:/|\}\{)(\d{1,4})\}?(?![\d/])")
_VOWEL = re.compile(r"[aeiou]", re.IGNORECASE)
_SHORT_WORDS = frozenset(
    [
        "no",
        "on",
        "is",
        "it",
        "in",
        "if",
        "up",
        "so",
        "to",
        "do",
        "go",
        "of",
        "or",
        "at",
        "by",
        "we",
        "he",
        "me",
        "my",
        "be",
        "am",
        "an",
        "as",
        "us",
    ]
)
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True)
class Form:
    """What an answer says."""

    kind: str
    text: str
    items: tuple[Form, ...] = ()
    signs: str = ""
    """The brackets of a tuple, or the signs of a relation."""
    amount: Amount = field(default_factory=lambda: Amount(""))
    value: Decimal | None = None
    """The value, if the node is a leaf that is a plain number."""


def readings(text: str, gold: bool = False) -> list[Form]:
    """The ways to read a cleaned text: "100,200" is a number, and a list of two.

    Args:
        text: The text.
        gold: It is a right answer: a letter after a number and a space ("5 m") is a variable. In
            other texts it may also be a unit.
    """
    forms = _readings(text, gold, strict=True)
    if not gold:
        forms += [form for form in _readings(text, gold, strict=False) if form not in forms]
    return forms


def _readings(text: str, gold: bool, strict: bool) -> list[Form]:
    forms = []
    parts = [part.strip() for part in text.split("≈")]
    if len(parts) > 1:
        first, second = parts[0], parts[1]
        if not first or _LABEL.fullmatch(first) or first in ("x", "=") or len(parts) > 2:
            text = second
        elif not gold and not _near(first, second):
            text = first
        else:
            forms += _readings(second, gold, strict)
            text = first
    forms.append(read(text, strict))
    joined = _without_separators(text)
    if joined != text:
        forms.append(read(joined, strict))
    if not gold and (mixed := _AND_FRACTION.match(text)) and int(mixed[2]) < int(mixed[3]):
        forms.append(read(f"{mixed[1]} {mixed[2]}/{mixed[3]}{text[mixed.end() :]}"))
    return forms


def read(text: str, strict: bool = False, nested: int = 0) -> Form:
    """Reads a cleaned text.

    Raises:
        TooCostly: It is nested too deeply.
    """
    if nested > _MAX_NESTED:
        raise TooCostly(f"an answer nested more than {_MAX_NESTED} deep")
    text = text.strip()
    if form := _whole(text) or _condition(text, strict, nested):
        return form

    def within(parts: list[str]) -> tuple[Form, ...]:
        return tuple(read(part, strict, nested + 1) for part in parts)

    unions = _split(text, _UNION)[0]
    if len(unions) > 1:
        return Form("union", text, within(unions))
    relations, signs = _split(text, _RELATION)
    if signs in ("=", "∈") and _LABEL.fullmatch(relations[0]):
        inner = read(relations[1], strict, nested + 1)  # x = 1, 2 and x ∈ [0, 1)
        if inner.kind != "leaf":
            return Form("relation", text, (_label(relations[0]), inner), signs="=")
    items = _items(text, _SEPARATOR)
    if len(items) > 1:
        return _list(text, within(items))
    if len(relations) > 1:
        return Form("relation", text, within(relations), signs=signs)
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[2].split(NEW_ROW) if row.strip()]
        return Form("matrix", text, tuple(Form("row", "", within(row)) for row in rows))
    brackets, elements = _enclosed(text)
    if brackets == "\\{\\}":
        return Form("set", text, within(elements))
    if len(elements) > 1:
        return Form("tuple", text, within(elements), signs=brackets)
    if brackets == "()" and elements:
        inner = read(elements[0], strict, nested + 1)
        if inner.kind not in ("leaf", "list"):
            return inner
    return _leaf(text, strict)


def _whole(text: str) -> Form | None:
    """A text that is one number, digits in a base, or numbers with colons."""
    value = literal(text)
    if value is not None:
        return Form("leaf", text, amount=Amount(text), value=value)
    if found := _BASE.fullmatch(text):
        base = found[2] or found[4]
        return Form("base", f"{(found[1] or found[3]).upper()}_{_BASES.get(base, base)}")
    if found := _CLOCK.fullmatch(text):
        numbers = ":".join(str(int(number)) for number in found[1].split(":"))
        return Form("clock", numbers, signs=(found[2] or "").lower())
    return None


def _condition(text: str, strict: bool, nested: int) -> Form | None:
    """The inequality of a set like {x | 0 < x < 1}."""
    builder = _BUILDER.fullmatch(text)
    if builder is None or not _balanced(builder[2]):
        return None
    inner = read(builder[2], strict, nested + 1)
    region = _region(inner)
    return inner if region and region[0] == builder[1] else None


def _list(text: str, items: tuple[Form, ...]) -> Form:
    """A list; inequalities in one name are a union, unless "and" joins them."""
    several = Form("union", text, items)
    if set(text) & set("<>≤≥∈") and "and" not in _split(text, _SEPARATOR)[1] and _region(several):
        return several
    return replace(several, kind="list")


def _items(text: str, separator: re.Pattern[str]) -> list[str]:
    """Returns the parts between separators; one with a plus-minus sign counts as two."""
    parts = [part for part in _split(text, separator)[0] if part]
    return [signed for part in parts for signed in _both_signs(part)]


def _enclosed(text: str) -> tuple[str, list[str]]:
    """The brackets around all of a text, and the elements in them."""
    opening = next((sign for sign in _OPENING if text.startswith(sign)), "{")
    closing = next((sign for sign in (")", "]", "\\}", "⟩") if text.endswith(sign)), "")
    inner = text[len(opening) : -len(closing)] if closing else ""
    if opening == "{" or not closing or not _balanced(inner):
        return "", []
    return opening + closing, _items(inner, _COMMA)


def same(gold: Form, found: Form) -> bool:
    """Whether two forms say the same.

    Raises:
        TooCostly: That cannot be told within bounded time.
    """
    if gold.kind == found.kind and squeezed(gold.text) == squeezed(found.text) and gold.text:
        return gold.kind != "clock" or not {gold.signs, found.signs} >= {"a", "p"}
    gold, found = _single(gold, found), _single(found, gold)
    left, right = _region(gold), _region(found)
    if left and right and (left[0] == right[0] or not left[0] or not right[0]):
        gold, found = left[1], right[1]
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


def _single(form: Form, other: Form) -> Form:
    """The element of a set of one, if it is compared with a number."""
    alone = form.kind == "set" and len(form.items) == 1 and other.kind == "leaf"
    return form.items[0] if alone else form


def squeezed(text: str) -> str:
    """The text without marks, and without spaces that do not part two numbers."""
    return _SPACES.sub("", text.replace("§", ""))


def wordy(text: str) -> bool:
    """Whether a text is words: letters that are neither functions nor a product of variables."""
    for word in _PROSE.findall(re.sub(r"\\[A-Za-z]+", " ", text)):
        if word.lower() in _SHORT_WORDS:
            return True
        tokens = names_in(word)
        letters = "".join(token for token in tokens if len(token) == 1)
        if len(letters) > 2 and _VOWEL.search(letters) and letters.lower() not in ("abc", "abcd"):
            return True
    return "§" in text


def words_of(text: str) -> str:
    """Words without case, articles, punctuation and style."""
    text = re.sub(r"\\[A-Za-z]+|§", " ", text.lower())
    return " ".join(re.sub(r"[^\w+\-/<>=]+", " ", _ARTICLES.sub(" ", text)).split())


def _leaf(text: str, strict: bool) -> Form:
    split = amount(text, strict)
    core = split.core.strip()
    while core[:1] in ("(", "{") and core[-1:] == _OPENING[core[:1]] and _balanced(core[1:-1]):
        core = core[1:-1].strip()
    value = literal(core)
    return Form(
        "leaf",
        text,
        amount=Amount(core, split.unit, split.percent, split.shift),
        value=None if value is None else shifted(value, split.shift),
    )


def _label(text: str) -> Form:
    return Form("leaf", text, amount=Amount(text))


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


def _region(form: Form) -> tuple[str, Form] | None:
    """Intervals, and the name that is in them: x > 3 is x in (3, ∞), and ℝ has no name."""
    if form.kind == "tuple":
        return "", form
    if form.kind == "leaf":
        return ("", read("(-\\infty, \\infty)")) if squeezed(form.text) in _REALS else None
    if form.kind == "union":
        regions = [_region(item) for item in form.items]
        found = [region for region in regions if region]
        names = {name for name, _ in found if name}
        if None in regions or len(names) > 1:
            return None
        return "".join(names), replace(form, items=tuple(interval for _, interval in found))
    if form.kind == "relation" and form.signs in ("=", "∈"):
        name, inner = squeezed(form.items[0].text), _region(form.items[1])
        return (name, inner[1]) if inner and not inner[0] else None
    return _interval(form) if form.kind == "relation" else None


def _interval(form: Form) -> tuple[str, Form] | None:
    """The name of an inequality and its interval."""
    for each in (form, _turned(form)):
        if each is None or not each.signs or not set(each.signs) <= set("<≤"):
            continue
        named = [_is_name(item.text) for item in each.items]
        low, high, signs = "-\\infty", "\\infty", each.signs
        if named == [True, False]:
            high, signs = each.items[1].text, "<" + signs
        elif named == [False, True]:
            low, signs = each.items[0].text, signs + "<"
        elif named == [False, True, False]:
            low, high = each.items[0].text, each.items[2].text
        else:
            continue
        name = squeezed(each.items[named.index(True)].text)
        opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
        return name, read(f"{opening}{low}, {high}{closing}")
    return None


def _same_relation(gold: Form, found: Form) -> bool:
    if gold.kind != "relation":
        value = _defined(found)
        return value is not None and same(gold, value)
    if found.kind != "relation":
        value = _defined(gold)
        return value is not None and same(value, found)
    if set(gold.signs + found.signs) == {"="}:
        left, right = _defined(gold), _defined(found)
        names = squeezed(gold.items[0].text), squeezed(found.items[0].text)
        if left is not None and right is not None:
            alike = names[0] == names[1] or "(" in names[0] + names[1]
            alike = alike or any(len(name) > 1 for name in names)
            if alike and same(left, right):
                return True
        return len(gold.signs) == len(found.signs) == 1 and _same_residual(gold, found, False)
    return _same_inequality(gold, found)


def _defined(form: Form) -> Form | None:
    """The value that an equation gives to a name, or to a calculation (20 - 2 = 18)."""
    if set(form.signs) != {"="}:
        return None
    *names, value = form.items
    if _is_name(value.text) and len(names) == 1 and not _is_name(names[0].text):
        names, value = [value], names[0]
    if all(_is_name(each.text) or _is_calculation(each) for each in names):
        return value
    return None


def _is_name(text: str) -> bool:
    return bool(_LABEL.fullmatch(text)) and text not in ("e", "i", "\\pi", INFINITY)


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
    for form in (gold, _turned(gold)):
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


def _turned(form: Form) -> Form | None:
    """Rewrites 3 > x as x < 3."""
    table = {**_REVERSED, ">": "<", "≥": "≤"}
    if not set(form.signs) <= set(table):
        return None
    signs = "".join(table[sign] for sign in reversed(form.signs))
    return Form("relation", form.text, form.items[::-1], signs=signs)


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], str]:
    """Splits a text at separators outside all brackets; also returns the separators' signs."""
    marks = sorted(
        [(m.start(), m.end(), "") for m in _BRACKET.finditer(text)]
        + [(m.start(), m.end(), m[0]) for m in separator.finditer(text)]
    )
    parts, signs, depth, begin = [], "", 0, 0
    for start, end, sign in marks:
        if not sign:
            depth += 1 if text[start:end] in _OPENING else -1
        elif depth == 0:
            parts.append(text[begin:start].strip())
            signs += sign
            begin = end
    return [*parts, text[begin:].strip()], signs


def _balanced(text: str) -> bool:
    """Whether no bracket of a text is closed before it is opened."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket[0] in _OPENING else -1
        if depth < 0:
            return False
    return depth == 0


def _both_signs(text: str) -> list[str]:
    """The two values of an expression with a plus-minus sign."""
    if text.count("±") + text.count("∓") > 3 or "±" not in text:
        return [text]
    upper = text.replace("±", "+").replace("∓", "-")
    return [upper.removeprefix("+"), text.replace("±", "-").replace("∓", "+")]


def _without_separators(text: str) -> str:
    """Rewrites 1,000x+1 as 1000x+1; text in brackets is not changed."""
    if any(bracket in text for bracket in "([⟨") or "\\{" in text:
        return text
    grouped = r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])"
    return re.sub(grouped, lambda number: number[0].replace(",", ""), text)


def _near(first: str, second: str) -> bool:
    """Whether an approximation is one of the value before it."""
    try:
        exact = parse(_leaf(second, False).amount.core)
        center = expressions.exact(exact)
        node = parse(_leaf(first, False).amount.core)
    except Unreadable:
        return False
    return center is not None and expressions.within(node, center, abs(center) / 50)
