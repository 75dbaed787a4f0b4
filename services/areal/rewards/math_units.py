"""Reads numbers with what stands beside them: units, currency, percent, counted things."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

NUMBER = r"(?:\d{1,3}(?:(?P<mark>[,' ])\d{3})(?:(?P=mark)\d{3})*(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_INDIAN = re.compile(r"\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?")
_DOTTED = re.compile(r"\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?")
"""1.234.567,89: two or more dots group the digits, and a comma begins the decimals."""
_PLAIN = re.compile(rf"(?P<sign>[-+]?) ?(?P<digits>{NUMBER})(?:[eE](?P<power>[-+]?\d{{1,9}}))?")
_SCIENTIFIC = re.compile(
    r"([-+]?\d+(?:\.\d+)?|[-+]?\.\d+)? ?(?:\\times|\\cdot|\*|x)? ?10 ?(?:\^|\*\*) ?"
    r"(?:\{ ?([-+]?\d{1,9}) ?\}|\(([-+]?\d{1,9})\)|([-+]?\d{1,9}))"
)
_EXACT = Context(prec=1_000_000, Emax=MAX_EMAX, Emin=MIN_EMIN)

_CURRENCY = {"$": "dollar", "£": "pound", "€": "euro", "¥": "yen", "₹": "rupee"}
_SPELLINGS = {
    "meter": "m metre meters metres",
    "centimeter": "cm centimetre centimeters centimetres cms",
    "millimeter": "mm millimetre millimeters millimetres",
    "kilometer": "km kilometre kilometers kilometres kms",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd yds",
    "mile": "mi",
    "gram": "g gms grams gramme",
    "kilogram": "kg kgs kilo kilos kilograms",
    "milligram": "mg",
    "pound": "lb lbs pounds gbp",
    "ounce": "oz",
    "second": "s sec secs",
    "minute": "min mins",
    "hour": "h hr hrs",
    "liter": "l litre litres liters",
    "milliliter": "ml millilitre milliliters",
    "dollar": "usd dollars bucks",
    "euro": "eur euros",
    "rupee": "rs rupees inr",
    "cent": "cents",
    "degree": "deg degrees",
    "celsius": "c",
    "fahrenheit": "f",
    "kelvin": "k",
    "newton": "n",
    "joule": "j",
    "watt": "w",
    "volt": "v",
    "ampere": "a amp amps",
    "pascal": "pa",
    "hertz": "hz",
    "mole": "mol moles",
    "ohm": "ohms",
    "coulomb": "coulombs",
    "radian": "rad radians",
    "person": "people persons",
    "child": "children",
    "percent": "pct percentage",
    "mph": "mph",
    "unit": "units",
}
_UNIT_OF = {
    spelling: unit for unit, all_of in _SPELLINGS.items() for spelling in [unit, *all_of.split()]
}
_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_PARTS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fifth": 5,
    "eighth": 8,
    "ninth": 9,
    "twelfth": 12,
    **{f"{_ONES[n]}th": n for n in (4, 6, 7, 10, 11, *range(13, 20))},
    "hundredth": 100,
    "thousandth": 10**3,
    "millionth": 10**6,
    **{f"{word[:-1]}ieth": 10 * tens for tens, word in enumerate(_TENS, 2)},
}
_POWERS = {"square": "power2", "sq": "power2", "cubic": "power3", "cu": "power3"}
_SINGLE = frozenset("mghslNJWVAKCFL")
_LETTERS = re.compile(r"(?:\s|/|\*|\\cdot|[A-Za-z](?![A-Za-z'])|\^\s*(?:\{\s*-?\d\s*\}|-?\d))+")
"""Single letters: variables, unless they are one of these units after a number in digits."""
_LETTER = re.compile(r" ?[mshglL]\.?")
_LETTERS_OF_UNITS = re.compile(
    r" ?m ?\^ ?\{?[23]\}?"
    r"| ?[mghslNJWVAKCFL] ?(?:/ ?[mghslL](?: ?\^ ?\{?[23]\}?)?|[msh] ?\^ ?\{?-[12]\}?)"
)
_JOINTS = {"per", "of", "a", "an", "the", "each", "every", "in", "and", "at", "to", "on", "for"}
_NO_UNITS = frozenset(
    [
        "or",
        "not",
        "no",
        "nor",
        "minus",
        "plus",
        "divided",
        "over",
        "under",
        "less",
        "than",
        "least",
        "most",
        "above",
        "below",
        "negative",
        "double",
        "twice",
        "triple",
        "thrice",
        "between",
        "except",
        "squared",
        "cubed",
        "factorial",
        "remainder",
        "base",
        "mod",
        "modulo",
        "wrong",
        "incorrect",
        "unsure",
        "maybe",
        "cannot",
        "unknown",
        "if",
        "where",
        "when",
        "is",
        "are",
        "was",
        "be",
        "january",
        "february",
        "march",
        "april",
        "may",
        "june",
        "july",
        "august",
        "september",
        "october",
        "november",
        "december",
        "monday",
        "tuesday",
        "wednesday",
        "thursday",
        "friday",
        "saturday",
        "sunday",
        "am",
        "pm",
        "noon",
        "midnight",
        "bc",
        "ad",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "ln",
        "log",
        "exp",
        "sqrt",
        "pi",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "lim",
        "max",
        "gcd",
        "lcm",
        "det",
        "infinity",
        "inf",
        "step",
        "problem",
        "question",
        "part",
        "case",
        "example",
        "exercise",
        "option",
        "choice",
        "page",
        "chapter",
        "equation",
        "figure",
        "section",
        "line",
        "method",
        "either",
        "neither",
        "but",
        "isn't",
        "aren't",
        "wasn't",
        "don't",
        "doesn't",
        "didn't",
        "can't",
        "perhaps",
        "possibly",
        "guess",
        "none",
        "zero",
        "frac",
        "text",
        "choose",
        "through",
        "until",
        "up",
        "down",
        "modulus",
        "power",
        "root",
        "product",
        "sum",
        "difference",
        "odd",
        "even",
        *_PARTS,
        *(f"{part}s" for part in _PARTS),
    ]
)
_COPULAS = frozenset(["is", "are", "was", "line"])
_CHANGES = frozenset(["per", "times", "more"])
"""Words that are units after a number ("8 times") and no names before one ("more than 8")."""
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALES = "(?:" + "|".join(_SCALES) + ")"
_UNIT_TOKEN = re.compile(
    r"\s*(?:(?P<joint>/|\\cdot|\*|-)|(?P<word>§?[A-Za-zµΩ][A-Za-z'µΩ]*)\.?"
    r"(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?)"
)
_FRACTION_UNIT = re.compile(
    r"\\frac(?!\{ ?[A-Za-z] ?\}\{ ?[A-Za-z] ?[\^}])"
    r"\{\s*(§?[A-Za-z]+)\s*\}\{\s*(§?[A-Za-z]+)\s*(\^\{?\d\}?)?\s*\}"
)
_FIRST_LETTER = re.compile(r"[\s/]*[A-Za-zµΩ](?![A-Za-z'µΩ])")
_DEGREES = re.compile(r"\^\\circ$")
_TRIGONOMETRY = re.compile(r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_SYMBOL_OF_DEGREES = re.compile(r"\^\\circ\s*§?([CFK])$")
_ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*\{?\s*)?(?:st|nd|rd|th)\s*\}?$")
_PERCENT = re.compile(r"\\?%$")
_LABEL = re.compile(
    r"([A-Za-z' ,\-]*?[A-Za-z])\.? ?(?::|=|≈| )\s*(?=[-+]?\s*[$£€¥₹]?\s*(?:\.?\d|\\frac|§))"
)
_WORD = re.compile(r"[A-Za-z']+")
_BARE_WORDS = re.compile(
    r"(?P<before>.*?)\s+\((?=[^)]*[A-Za-z]{3})\s*[A-Za-z][A-Za-z ,'\-]+\)"
    r"|(?P<number>[-+\d.,]*\d) +\([A-F]\)"
)
_APPLIED = re.compile(r"\\[A-Za-z]+$")
PARTS = "(?:" + "|".join(_PARTS) + ")s?"
"""The words that name the parts of a fraction: sixth, sevenths, halves."""
_WORD_FRACTION = re.compile(
    rf"(?<![\w.,/^])(?:1 ({'|'.join(_PARTS)})|(\d{{1,9}}) ({'|'.join(_PARTS)})s)(?![\w'-])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Amount:
    """An expression with its unit."""

    core: str
    unit: str = ""
    percent: bool = False
    shift: int = 0
    """Powers of ten that a word stands for: 6 for "million"."""


def literal(text: str) -> Decimal | None:
    """The value of a text that is one number, with separators or an exponent; else None."""
    if found := _PLAIN.fullmatch(text):
        digits = found["digits"].replace(found["mark"] or ",", "")
        return _decimal(f"{found['sign']}{digits}e{found['power'] or 0}")
    if _DOTTED.fullmatch(text.lstrip("+-")):
        return _decimal(text.replace(".", "").replace(",", "."))
    if _INDIAN.fullmatch(text.lstrip("+-")):
        return _decimal(text.replace(",", ""))
    if found := _SCIENTIFIC.fullmatch(text):
        sign = "-" if text.startswith("-10") else ""
        return _decimal(f"{sign}{found[1] or '1'}e{found[2] or found[3] or found[4]}")
    if text.startswith(("-", "+")) and text[1:].strip().startswith("10") and "^" in text:
        value = literal(text[1:].strip())
        return value if value is None or text[0] == "+" else value.copy_negate()
    return None


def shifted(value: Decimal, powers: int) -> Decimal:
    """The value times a power of ten, exactly."""
    return _EXACT.scaleb(value, powers) if powers else value


def amount(text: str, strict: bool = False) -> Amount:
    """Splits a cleaned text into an expression and its unit; the unit is "" if there is none.

    Args:
        text: The text.
        strict: A single letter after a number and a space ("5 m") is a variable, not a unit.
    """
    text = _WORD_FRACTION.sub(_fraction_of_words, _digits_for_words(_without_remark(text)))
    text = _SYMBOL_OF_DEGREES.sub(r"^\\circ §\1", _ORDINAL.sub("", text))
    sign = ""
    label = _LABEL.match(text)
    if label and text[0] == "-" and not set(label[0]) & set(":=≈"):  # -Rs. 5, and no bullet
        sign, text = "-", text[1:].lstrip()
        label = _LABEL.match(text)
    if label:
        words = _WORD.findall(label[1])
        # A single letter is a variable, unless it is a word of a sentence.
        if all(len(word) > 1 or (len(words) > 1 and word in "aAI") for word in words):
            if not all(_says_nothing(word) for word in words):
                return Amount(text)
            text = text[label.end() :]
    if not sign and text[:1] in ("+", "-"):
        sign, text = text[0], text[1:].lstrip()
    unit = ""
    text = re.sub(r"^(?:US|CA|AU|C|A)(?=\$)", "", text)
    if text[:1] in _CURRENCY:
        unit, text = _CURRENCY[text[0]], text[1:].lstrip()
    if text[-1:] in _CURRENCY and len(text) > 1:
        unit, text = _CURRENCY[text[-1]], text[:-1].rstrip()
    core, shift, words = _peeled(_FRACTION_UNIT.sub(r" \1/\2\3", text), strict)
    core = core if shift or words else text
    percent = False
    if not words and _PERCENT.search(core):
        core, percent = _PERCENT.sub("", core).rstrip(), True
    elif (degrees := _DEGREES.search(core)) and not _TRIGONOMETRY.search(core):
        core, words = core[: degrees.start()].rstrip(), words or ["degree"]
    if words == ["percent"]:
        words, percent = [], True
    if words[:1] == ["degree"] and len(words) > 1:
        words = words[1:]
    if unit and words[:1] != [unit]:
        words = [unit, *words]
    return Amount(sign + core, " ".join(words), percent, shift)


def _without_remark(text: str) -> str:
    r"""Leaves out words in brackets at the end, "18 (eggs)"; \sin(x) and f(x) are no such thing."""
    found = _BARE_WORDS.fullmatch(text)
    if found is None:
        return text
    kept: str = (found["before"] or found["number"] or "").rstrip()
    return text if not kept or _APPLIED.search(kept) else kept


def compatible(left: str, right: str) -> bool:
    """Whether two units may stand for the same: equal, absent, or one with more words."""
    if not left or not right or left == right:
        return True
    short, long = sorted((left.split(), right.split()), key=len)
    if long[: len(short)] == short:
        return "power" not in "".join(long[len(short) :])
    return long[-len(short) :] == short and "per" not in long


def _decimal(text: str) -> Decimal | None:
    try:
        return _EXACT.create_decimal(text)
    except ArithmeticError:
        return None


def _digits_for_words(text: str) -> str:
    """Writes "twelve eggs" as "12 eggs", and "one-third" as "1 third", unless there are digits."""
    if any(character.isdigit() for character in text):
        return text
    words = text.split(" ")
    first, _, second = words[0].lower().partition("-")
    if first in _TENS:
        value = 10 * (_TENS.index(first) + 2)
        if second in _ONES[1:10]:
            return " ".join([str(value + _ONES.index(second)), *words[1:]])
        if not second:
            return " ".join([str(value), *words[1:]])
    if first in _ONES and (not second or second.removesuffix("s") in _PARTS):
        return " ".join([str(_ONES.index(first)), *second.split(), *words[1:]])
    return text


def _fraction_of_words(found: re.Match[str]) -> str:
    r"""Writes "1 sixth" and "5 sixths" as \frac{1}{6} and \frac{5}{6}."""
    above, part = found[2] or "1", found[1] or found[3]
    return f"\\frac{{{above}}}{{{_PARTS[part.lower()]}}}"


def _says_nothing(word: str) -> bool:
    """Whether a word before a number leaves its value as it is."""
    lower = word.lower()
    return lower in _COPULAS or lower not in _NO_UNITS | _CHANGES


def _peeled(text: str, strict: bool) -> tuple[str, int, list[str]]:
    """The text without its unit, the powers of ten of "million", and the unit's words."""
    if len(text) > 200:
        return text, 0, []
    for start in re.finditer(r"(?<![A-Za-z\\§'])§?[A-Za-zµΩ]|/(?=\s*§?[A-Za-z])", text):
        core = text[: start.start()]
        if not re.search(r"\d|\\|^\s*§?[A-Za-z]\s*$", core):
            continue  # words alone have no unit
        if core.rstrip()[-1] in "+-*/^_=({[<>≤≥":
            continue
        words = _unit(text[start.start() :], core, strict)
        if words is not None:
            shift = 0
            while words and words[0] in _SCALES:
                shift += _SCALES[words.pop(0)]
            return core.rstrip(), shift, words
    return text, 0, []


def _unit(text: str, before: str, strict: bool) -> list[str] | None:
    """The words of a unit, or None if the text is not one."""
    words: list[str] = []
    spaced = before.endswith(" ") or text.startswith("§")
    if _begins_with_variable(text, spaced and literal(before.strip()) is not None, strict):
        return None
    position = 0
    while position < len(text):
        found = _UNIT_TOKEN.match(text, position)
        if found is None:
            return None
        position = found.end()
        if found["joint"]:
            if found["joint"] == "/":
                words.append("per")
            continue
        word = found["word"].lstrip("§")
        lower = word.lower()
        known = _UNIT_OF.get(lower) if len(word) > 1 or word in _SINGLE else None
        ends = not text[position:].strip()
        if lower in _NO_UNITS and not (lower == "sec" and ends):  # no secant without an argument
            return None
        is_inch = lower == "in" and (ends or found["power"])
        if lower in _SCALES or (lower in _JOINTS and not is_inch):
            if not spaced and not words:
                return None
            if lower in _SCALES or lower == "per":
                words.append(lower)
            continue
        if len(word) == 1 and known is None and "§" not in found["word"]:
            return None
        short = len(word) < 3 and lower not in _POWERS
        if known is None and (short or not (spaced or words)) and "§" not in found["word"]:
            return None
        plural = len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss")
        single = lower[:-1] if plural else lower
        words.append(known or _UNIT_OF.get(single, single))
        if found["power"]:
            words.append(f"power{found['power']}")
    return _ordered(words)


def _begins_with_variable(text: str, after_number: bool, strict: bool) -> bool:
    """Whether a text begins with a single letter that is a variable, not the letter of a unit."""
    if not _FIRST_LETTER.match(text) or not after_number:
        return bool(_FIRST_LETTER.match(text))
    if not _LETTERS.fullmatch(text) or _LETTERS_OF_UNITS.fullmatch(text):
        return False
    return strict or not _LETTER.fullmatch(text)


def _ordered(words: list[str]) -> list[str]:
    """Turns "square" and "cubic" before a unit into its powers."""
    ordered: list[str] = []
    power = ""
    for word in words:
        if word in _POWERS:
            power = _POWERS[word]
            continue
        ordered.append(word)
        if power:
            ordered.append(power)
            power = ""
    if power:
        ordered.append(power)
    return ordered
