"""Reads a cleaned answer as a form: a number, list, interval, equation or word.

text ──> split at its outermost signs ──> list, tuple, set, union, matrix, relation
     └── nothing to split at ──> leaf: an expression with a unit, or words
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal

from areal.rewards import math_expressions as expressions
from areal.rewards.math_text import NEW_ROW
from areal.rewards.math_tree import GREEK, INFINITY, TooCostly, Unreadable, names_in, parse
from areal.rewards.math_units import Amount, amount, literal, shifted

_MAX_NESTED = 20

_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "⟨": "⟩"}
_BRACKET = re.compile(r"\\[{}]|[()\[\]{}⟨⟩]")
_MATRIX = re.compile(
    r"[(\[]? ?\\begin\{((?:[pb]|small)?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\} ?[)\]]?",
    re.DOTALL,
)
_SEPARATOR = re.compile(r",\s*(?:and|or)\b|[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_COMMA = re.compile(",")
_UNION = re.compile("∪")
_RELATION = re.compile(r"[=<>≤≥≠∈]")
_BASE = re.compile(
    r"\(?(-?[0-9A-Fa-f]+)\)?\s*_\s*\{?\s*(\d{1,2}|two|three|eight|ten|sixteen)\s*\}?"
    r"|(-?[0-9A-Fa-f]+) ?\(?(?:in )?base (\d{1,2}|two|three|eight|ten|sixteen)\)?"
)
_BASES = {"two": "2", "three": "3", "eight": "8", "ten": "10", "sixteen": "16"}
_CLOCK = re.compile(
    r"(\d{1,9}(?: ?: ?\d{1,9})+)\s*(?:§?([AaPp])\.? ?§?[Mm]\.?)?|(\d{1,9}) to (\d{1,9})"
)
# A set, a segment, a vector or a complex number; |x| = 3 says nothing like x = 3.
_SIZED = r"(?:[A-Z][A-Za-z]*|[uvwz]|\\vec ?\{?[A-Za-z]+\}?)"
_SEGMENT = "[A-Z]{2,6}"
# x(x+1) is a product, and ln(x) an equation's side.
_NO_LABEL = (
    r"(?:([A-Za-z]) ?\([^()]*\1"
    r"|\\?(?:sqrt|ln|log|lg|exp|abs)(?![A-Za-z])|(?:sin|cos|tan|cot|sec|csc) ?\()"
)
_TERM = r"[A-Za-z]'*(?:_(?:\w|\{[^{}=]{1,20}\}))?"
_ANGLE = rf"(?:\d? ?{GREEK}|\\angle ?[A-Z]{{1,3}}|[A-Z]{{1,3}})"
_LABEL = re.compile(
    # A letter, P(X = 2), f^{-1}(x), a_{n+1}, E[X], Var(X).
    rf"(?!{_NO_LABEL})"
    r"(?:[A-Za-z]|[A-Za-z]{3,}(?= ?\()|\\[A-Za-z]+|\\mathbb\{[A-Z]\})"
    r"(?:_(?:\w{1,9}|\{[^{}=]{1,20}\}))?'*(?:(?:\^\{-1\})? ?\([^()]{0,20}\)|\[[^\[\]]{0,20}\])?"
    rf"|\\frac\{{ ?{_SEGMENT} ?\}}\{{ ?{_SEGMENT} ?\}}|{_SEGMENT} ?[/:] ?{_SEGMENT}|\[{_SEGMENT}\]"
    r"|\([a-z](?:, ?[a-z]){1,3}\)|[A-Z]{2,4}"
    r"|m?\\(?:angle|overline|bar|hat|vec|triangle|widehat|\|)[^0-9=]*"
    rf"|\| ?{_SIZED} ?\||\\[lv]vert ?{_SIZED} ?\\[rv]vert"
    rf"|{_TERM}(?: ?[-+*/]? ?{_TERM}){{1,5}}|\\frac\{{ ?{_TERM} ?\}}\{{ ?{_TERM} ?\}}"
    # cos A, tan 2θ; sin x and log x are sides of equations.
    rf"|\\(?:sin|cos|tan|cot|sec|csc) ?(?:{_ANGLE}|\( ?{_ANGLE} ?\))"
    r"|\\frac\{ ?d(?:\^2)? ?[A-Za-z]? ?\}\{ ?d ?[A-Za-z](?:\^2)? ?\}"
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
        parts = found[1].split(":") if found[1] else found.groups()[2:]
        numbers = ":".join(str(int(part)) for part in parts)
        return Form("clock", numbers, signs=(found[2] or "").lower())
    return None


def _condition(text: str, strict: bool, nested: int) -> Form | None:
    """The inequality of a set like {x | 0 < x < 1}."""
    builder = _BUILDER.fullmatch(text)
    if builder is None or not _balanced(builder[2]):
        return None
    inner = read(builder[2], strict, nested + 1)
    found = region(inner)
    return inner if found and found[0] == builder[1] else None


def _list(text: str, items: tuple[Form, ...]) -> Form:
    """A list; inequalities in one name are a union, unless "and" joins them."""
    several = Form("union", text, items)
    if set(text) & set("<>≤≥∈") and "and" not in _split(text, _SEPARATOR)[1] and region(several):
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


def region(form: Form) -> tuple[str, Form] | None:
    """Intervals, and the name that is in them: x > 3 is x in (3, ∞), and ℝ has no name."""
    if form.kind == "tuple":
        return "", form
    if form.kind == "leaf":
        return ("", read("(-\\infty, \\infty)")) if squeezed(form.text) in _REALS else None
    if form.kind == "union":
        regions = [region(item) for item in form.items]
        found = [each for each in regions if each]
        names = {name for name, _ in found if name}
        if None in regions or len(names) > 1:
            return None
        return "".join(names), replace(form, items=tuple(interval for _, interval in found))
    if form.kind == "relation" and form.signs in ("=", "∈"):
        name, inner = squeezed(form.items[0].text), region(form.items[1])
        return (name, inner[1]) if inner and not inner[0] else None
    return _interval(form) if form.kind == "relation" else None


def _interval(form: Form) -> tuple[str, Form] | None:
    """The name of an inequality and its interval."""
    for each in (form, turned(form)):
        if each is None or not each.signs or not set(each.signs) <= set("<≤"):
            continue
        named = [is_name(item.text) for item in each.items]
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


def is_name(text: str) -> bool:
    """Whether a text names what may have a value: x, f(x), AB, |z|, area of ABC."""
    return bool(_LABEL.fullmatch(text)) and text not in ("e", "i", "\\pi", INFINITY)


def turned(form: Form) -> Form | None:
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
