"""Scores the letter that a completion chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from areal.errors import InvalidInput
from areal.rewards.boxed import final_part, last_boxed, last_tagged

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_PROSE = 8000
_STYLED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|boldsymbol|emph)\s*\{"
    r"((?:[^{}\\]|\\.)*)\}"
)
_NOISE = re.compile(r"\\[\[\]()]|\\[,;:! ]|\\(?:quad|left|right)(?![A-Za-z])|[*$`_\"“”„«»~{}]|\\")
_QUOTED = re.compile(r"(?<!\w)'([A-Za-z])'(?!\w)")
_FULL_WIDTH = str.maketrans({chr(0xFF01 + i): chr(0x21 + i) for i in range(94)} | {"’": "'"})

_ENCLOSED = r"[(\[<]{1,2}\s*(?P<enclosed>[A-Za-z])\s*[)\]>]{1,2}"
_LEADING = re.compile(
    r"\s*(?:(?:the\s+)?(?:correct\s+|right\s+|best\s+|final\s+)?(?:option|choice|answer|letter)s?"
    rf"\s*:?\s*(?:is\s*:?\s*)?)?(?:{_ENCLOSED}"
    r"|(?P<marked>[A-Za-z])\s*(?:[):!]|\.(?!\w)|\s[-–—]\s|,(?=\s+(?:because|since|as|for)\b))"
    r"|(?P<whole>[A-Za-z])\s*$)",
    re.IGNORECASE,
)
"""A letter with a mark: (B), [b], B), B., B:, B -; or a letter that is the whole text."""
_MENTIONED = (
    rf"(?:{_ENCLOSED}"
    r"|(?!I\s+(?!is\b|was\b|because\b|and\b|or\b)[a-z])(?P<capital>[A-Z])(?![\w'])"
    r"|(?P<small>[a-z])(?=\s*(?:[).:,;!]|$)))"
)
_NAMED = r"(?i:\s*(?:option|choice|letter|answer)\s*:?\s*)?"
_SUBJECT = (
    r"\b(?i:answer|ans|option|choice|solution|letter|one)\b\.?"
    r"(?i:\s+(?!is\b|not\b|was\b|\w+n't\b|can\b|cannot\b|could\b|may\b|might\b|never\b|to\s+[A-Z]\b)"
    r"[a-z'-]+){0,6}?"
)
_IS = (
    r"(?i:\s*(?:\b(?:is|was|(?:(?:would|should|must|will|has\s+to|seems\s+to)\s+)?be)\b\s*:?|[:=-]>?|–|—|→|⇒)"
    r"\s*(?:(?:therefore|thus|hence|clearly|then|definitely|indeed),?\s+)?)"
)
_ENDS = r"\s*(?=[.!,]|$)"
_STATEMENTS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"{_SUBJECT}{_IS}{_NAMED}{_MENTIONED}",
        rf"\b(?i:answer|ans)\.?\s+{_ENCLOSED}",
        rf"\b(?i:ans)\.?\s+{_MENTIONED}{_ENDS}",
        r"\b(?i:choose|chose|pick|select|selecting|choosing|go\s+with|going\s+with|settle\s+on|opt\s+for)"
        rf"\s+{_NAMED}{_MENTIONED}",
        r"(?:\b(?i:option|choice|answer|statement|only|but)\s+|^\s*"
        r"|[.;,:]\s+(?i:(?:so|thus|hence|therefore),?\s+)?)"
        rf"{_MENTIONED}[^.;\n]{{0,60}}?\s(?i:is|must\s+be|would\s+be|has\s+to\s+be)\s+"
        r"(?i:(?:the\s+)?(?:only\s+)?(?:clearly\s+|definitely\s+|therefore\s+|thus\s+|also\s+)?"
        r"(?:correct|right|true|best|answer))\b",
        rf"\b(?i:so|thus|hence|therefore)\b,?\s+(?i:it\s+(?:is|must\s+be)\s+|it's\s+)?{_NAMED}"
        rf"{_MENTIONED}{_ENDS}",
        rf"\b(?i:it\s+is|it's|it\s+must\s+be|I'd\s+say|I\s+say)\s+{_NAMED}{_MENTIONED}{_ENDS}",
        r"\b(?i:not)\s+(?:(?:option|choice)\s+)?[(\[]?[A-Z][)\]]?\s*,?\s*(?:but|it(?:'s| is))\s+"
        rf"(?:rather\s+)?{_NAMED}{_MENTIONED}",
        r"\b(?i:answer|option|choice)\b(?:(?!\bnot\b|n't)[^.\n]){0,60}\b(?i:is)\s*:?\s*"
        rf"{_NAMED}{_MENTIONED}{_ENDS}",
        rf"\b(?i:no)\b\s*[,:]\s*{_NAMED}{_MENTIONED}{_ENDS}",
        rf"\w\s+[a-z]+[^.!?\n]*[.!?\n]\s*{_MENTIONED}\s*[.!]?\s*\Z",
    )
)
_ANSWER_TEXT = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*:)\s*([^\n]{1,200})$", re.I | re.MULTILINE)
_UNSURE = re.compile(
    r"(?:\b(?:not|never|if|whether|maybe|perhaps|either|neither|could|might|may|doubt|cannot)|n't)"
    r"\s+(?:\w+\s+){0,3}$",
    re.IGNORECASE,
)
"""Words before a statement that make it a question or negate it."""
_ALSO = re.compile(
    r"\s*(?:,\s*)?(?:\b(?:or|and|and/or|nor)\b|/|&)\s*(?:(?:option|choice)\s+)?"
    r"[(\[]?[A-Z][)\]]?(?![\w'])|\s*,\s*[(\[]?[A-Z][)\]]?(?=\s*(?:[.,;!]|$|and\b|or\b))",
    re.MULTILINE,
)
_TAKEN_BACK = re.compile(
    r"\s*\?|(?:\s*,\s*which|(?:(?!\bbecause\b|[(\[]?\b[A-Z]\b)[^.,;\n]){0,40}?)\s+(?:is|are|was|seems|looks)(?:n't|\s+not|\s+tempting"
    r"|\s+(?:also\s+|clearly\s+|definitely\s+)?(?:wrong|incorrect|false|unlikely))\b",
    re.IGNORECASE,
)
_AFTER_LETTER = re.compile(
    r"\s+(?:because|since|as|for|is|was|and|or|but|due|which|not|where|by|in|with|again|instead)\b"
)
_OTHER = re.compile(r"[(\[]([A-Z])[)\]]|(?<![\w'])([A-Z])(?=[.:)])|[,;]\s*([A-Z])\s*$")


def multiple_choice_reward(
    completion: str, answer: str | int, choices: Sequence[Any] | None = None
) -> float:
    r"""Returns 1.0 if the completion chooses the right letter, else 0.0.

    The choice is the leading letter of the last ``\boxed{}``, or of the last ``<answer>``. Without
    these, it is the letter that the text states last as its answer ("the answer is (B)", "option B
    is correct"), or else the letter at the beginning of the only line. In a box, the full text of
    one of the `choices` counts as its letter. A text that leaves its choice open scores 0.

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
    return float(chosen_letter(completion, allowed, choices) == right)


def chosen_letter(
    completion: str, allowed: str = _LETTERS, choices: Sequence[Any] | None = None
) -> str | None:
    """The letter that a completion settles on; None when it names none of those allowed."""
    text = final_part(completion)
    held = last_boxed(text)
    if held is None:
        held = last_tagged(text)
    if held is not None:
        return _held(_plain(held[:_MAX_PROSE]), allowed, choices or ())
    prose = _plain(text[-_MAX_PROSE:])
    stated = _stated(prose, allowed, choices or ())
    if stated is not None:
        return stated or None
    named = _ANSWER_TEXT.findall(prose)
    by_text = _by_text(named[-1], allowed, choices or ()) if named else None
    return by_text or _leading(prose, allowed, choices or ())


def _plain(text: str) -> str:
    """The text without styles, quotes and marks of emphasis."""
    text = text.translate(_FULL_WIDTH)
    for _ in range(3):
        styled = _STYLED.sub(r" \1 ", text)
        if styled == text:
            break
        text = styled
    return _QUOTED.sub(r"\1", _NOISE.sub("", text)).strip()


def _held(text: str, allowed: str, choices: Sequence[Any]) -> str | None:
    """The letter that the content of a box begins with, or whose option it is."""
    found = _LEADING.match(text)
    if found is not None:
        return _alone(text, found, allowed, choices)
    if re.match(r"[A-Z]\s+\S", text):  # "B 12 metres"
        named = _by_text(text[1:], allowed, choices)
        if named == text[0]:
            return named
    return _by_text(text, allowed, choices) or _stated(text, allowed, choices) or None


def _leading(prose: str, allowed: str, choices: Sequence[Any]) -> str | None:
    """The one letter that lines begin with, or the option that the text is."""
    lines = [line for line in prose.split("\n") if line.strip()]
    found = [(line, match) for line in lines if (match := _LEADING.match(line))]
    if not found:
        return _by_text(prose, allowed, choices)
    letters = {_alone(line, match, allowed, choices) for line, match in found}
    return letters.pop() if len(letters) == 1 else None


def _alone(text: str, found: re.Match[str], allowed: str, choices: Sequence[Any]) -> str | None:
    """The letter that a text begins with, unless another one follows or takes it back."""
    letter, end = _letter_of(found)
    if letter not in allowed:
        return None
    rest = text[end:].lstrip(")]>")
    if _by_text(rest, allowed, choices) == letter:
        return letter
    others = {other for match in _OTHER.findall(rest) for other in match} & set(allowed)
    return None if others - {letter} or _ALSO.match(rest) or _TAKEN_BACK.match(rest) else letter


def _letter_of(found: re.Match[str]) -> tuple[str, int]:
    """The letter of a match, and where it ends."""
    name = next(name for name, letter in found.groupdict().items() if letter)
    return found[name].upper(), found.end(name)


def _by_text(text: str, allowed: str, choices: Sequence[Any]) -> str | None:
    """The letter of the only option with that text."""
    wanted = _words(text)
    found = [
        letter for letter, choice in zip(allowed, choices, strict=False) if _words(choice) == wanted
    ]
    return found[0] if len(found) == 1 and wanted else None


def _words(text: Any) -> str:
    return " ".join(re.sub(r"[^\w.%+\-/]+", " ", str(text).lower()).strip(" .").split())


def _stated(prose: str, allowed: str, choices: Sequence[Any]) -> str | None:
    """The letter that a text states last as its answer; "" if that is left open; None without one.

    A letter that is no option, and the article "A", state nothing.
    """
    last = (-1, "")
    for pattern in _STATEMENTS:
        for found in pattern.finditer(prose):
            letter, end = _letter_of(found)
            rest = prose[end:].lstrip(")]>")
            if end <= last[0] or letter not in allowed:
                continue
            option = _by_text(rest.partition("\n")[0], allowed, choices) == letter
            begins_word = prose[end - 1] in "AI" and re.match(r"\s+[a-z]", rest)
            if begins_word and not option and not _AFTER_LETTER.match(rest):
                continue
            before = prose[max(0, found.start() - 30) : found.start()].rpartition("\n")[2]
            corrected = found[0].lower().startswith("not")  # not A but B
            unsure = not corrected and _UNSURE.search(before)
            asked = prose[found.end() :].lstrip().startswith("?")
            is_open = unsure or asked or _ALSO.match(rest) or _TAKEN_BACK.match(rest)
            last = (end, "" if is_open else letter)
    return None if last[0] < 0 else last[1]


def _letter(answer: str | int) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(_LETTERS):
        return _LETTERS[answer]
    if isinstance(answer, str):
        text = answer.strip().strip("()").upper()
        if len(text) == 1 and text in _LETTERS:
            return text
    raise InvalidInput(f"answer {answer!r}: expected a letter, or its index from 0")
