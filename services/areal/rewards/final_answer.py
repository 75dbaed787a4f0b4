r"""Finds the final answer to a question of mathematics in a completion.

last box ── else <answer> ── else after the last "####" ── else what the text states as its answer
("the answer is 18") ── else the text itself, if it is one line ── else the last number of the last
sentence that has one, unless that sentence hedges
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from areal.rewards.boxed import final_part, last_boxed, last_tagged
from areal.rewards.math_text import unemphasized
from areal.rewards.math_units import NUMBER, PARTS, SCALES

_MAX_PROSE = 4000
_BARE_LINE = 120
_STATED = re.compile(
    r"\b(?:answer|result|solution|total)\b(?:\s+(?!is\b|are\b|was\b|not\b)[\w'()]+){0,8}\s*"
    r"(?:\b(?:is|are|was|equals|should be|must be|would be)\b\s*:?|:|=|：)\s*",
    re.IGNORECASE,
)
_ANSWER = re.compile(r"\banswer\b", re.IGNORECASE)
_HEADING = re.compile(r"(?:the\s+)?(?:final\s+)?(?:answer|result|solution)\s*:?\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<!\d)[.!?;](?=\s|$)|\.(?=\s|$)|\n")
_AFTER_ANSWER = re.compile(
    r"[,;:]?\s+(?:not|because|since|as|so|which|when|where|after|if|instead|but|and not|rather)\b.*"
    r"|\s+[-–—]+\s.*|\s+\((?![\d.,\s-]+\)).*|,\s+(?:that|this|it|we|he|she|they|giving|making)\b.*",
    re.DOTALL | re.IGNORECASE,
)
_CONNECTIVE = re.compile(r"(?:so|thus|hence|therefore|finally),\s+", re.IGNORECASE)
_HEDGES = re.compile(
    r"\b(?:or|maybe|either|neither|perhaps|possibly|might|not|unsure|cannot|can't|isn't|between|guess"
    r"|wrong|incorrect|don't|doesn't|around|less than|more than|at least|at most)\b|\?",
    re.IGNORECASE,
)
_INLINE_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    rf"(?<![\w.,/^_\\{{}}])-?\s?[$£€]?\s?{NUMBER}(?:/\d+)?(?:\s?\\?%| (?:{SCALES}|{PARTS})\b)?"
    r"(?![\w^_{}/]|[.,]\d)"
)


def final_answer(completion: str) -> str:
    """Returns the text of the final answer; "" if there is none."""
    text = final_part(completion)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    tagged = last_tagged(text)
    if tagged is not None:
        return tagged
    for tail in _tails(text):
        return tail
    text = text.strip()
    prose = unemphasized(text[-_MAX_PROSE:]).replace("`", "").replace("__", "")
    stated = _stated(prose)
    if stated is not None:
        return stated
    if len(text) <= _BARE_LINE and "\n" not in text and not _is_prose(text):
        return text[found.end() :] if (found := _CONNECTIVE.match(text)) else text
    return _last_value(prose)


def _tails(text: str) -> Iterator[str]:
    """Yields what follows "####" on its line or on the next ones, from the last mark backwards."""
    for tail in reversed(text.split("####")[1:][-20:]):
        lines = [line.strip() for line in tail.lstrip("#").strip().split("\n") if line.strip()]
        if lines and _HEADING.fullmatch(lines[0].replace("*", "")):
            del lines[0]
        if lines:
            yield unemphasized(lines[0])
            return


def _stated(prose: str) -> str | None:
    """Returns what the text calls its answer, up to the end of the sentence."""
    found = list(_STATED.finditer(prose))[-20:]
    named = [match for match in found if _ANSWER.match(match[0])]
    for match in reversed(named or found):
        rest = prose[match.end() :].lstrip(" \n:*")
        math = _INLINE_MATH.match(rest)
        if math:
            after = rest[math.end() :]
            inner = next(group for group in math.groups() if group is not None)
            if not re.match(r"\s*(?:or|and|,)\b", after):
                return inner
        sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
        sentence = _AFTER_ANSWER.sub("", sentence).strip()
        if sentence and (named or any(character.isdigit() for character in sentence)):
            return sentence
    return None


def _is_prose(text: str) -> bool:
    """Whether a line is a sentence with a number: it has three words or more."""
    words = re.findall(r"(?<![A-Za-z'\\])[A-Za-z']{2,}", text)
    return len(words) > 2 and any(map(str.isdigit, text))


def _last_value(prose: str) -> str:
    """The last number of the last sentence with one: after its last "=", or by itself."""
    sentences = [s for s in _SENTENCE_END.split(prose) if any(map(str.isdigit, s))]
    if not sentences:
        return ""
    sentence = sentences[-1]
    if _HEDGES.search(sentence):
        return ""
    math = [str(next(g for g in found if g)) for found in _INLINE_MATH.findall(sentence)]
    if (
        math
        and any(map(str.isdigit, math[-1]))
        and not re.search(r"\d", sentence.rpartition("$")[2])
    ):
        return math[-1].rpartition("=")[2].strip()
    _, equals, right = sentence.rpartition("=")
    numbers = list(_NUMBER.finditer(right if equals else sentence))
    if equals:
        return right.strip() if len(numbers) <= 1 else numbers[0][0]
    if len(numbers) > 3 and not re.search(r"[A-Za-z+*/=-]", sentence):
        return ""  # an enumeration
    return numbers[-1][0] if numbers else ""
