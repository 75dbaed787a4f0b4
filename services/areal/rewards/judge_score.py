"""Reads the score in a judge's answer, from the form that the judge was asked for: "Score: N".

Marks of emphasis, brackets, JSON and tags around the form are read through, and so is a scale
beside the number (8/10, 4 out of 5, 80%). A range, a calculation, a number outside its scale or a
last "Score:" without a number is no score: the judge is then asked again, rather than misread.
"""

from __future__ import annotations

import re

from areal.rewards.boxed import final_part

_SCORE = re.compile(
    r"(?:^|[.!?:;,)}{\]>]|(?<=[\"'`<*#\-•]))[ \t<>#*_\-•|\"'`{\[(]{0,20}"
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|final|overall|total|numeric(?:al)?)\s+){0,3}"
    r"score[\"'*_]*\s*"
    r"(?:\(?\s*(?P<label>(?:from\s+)?\d+\s*(?:-|–|to)\s*\d+|(?:out\s+of|of|/)\s*\d+)\s*\)?[*_]*\s*)?"
    r"(?P<sign>[:=：]|\s(?:is|of)\b\s*:?|-(?=\s)|–|—|>|\n)",
    re.IGNORECASE | re.MULTILINE,
)
_WHOLE = re.compile(r"\W*\d+(?:\.\d+)?(?:\s*(?:/|out of)\s*\d+)?\W*")
_MAX_CHARS = 20_000
_BRACKETED = re.compile(r"\[\[\s*([^\[\]\n]{1,12})\s*\]\]")
_PLACEHOLDER = re.compile(r"[\s*_\"'`]*(?:[<\[{]+\s*[A-Za-z ]{1,20}\s*[>\]}]+|[NXnx]\b(?!/A))")
_NUMBER = re.compile(
    r"[\s*_\"'`$(\[{]*(?:\\boxed\{|\\text\{)?[\s\[({*]*(?P<number>[+]?\d+(?:\.\d+)?)(?P<tail>[^\n]*)"
)
_CLOSING = re.compile(r"[*_\"'`$)\]}]+")
_OUT_OF = re.compile(
    r"\s*(?:points?|pts\.?|stars?)?\s*[(\[]?"
    r"(?:/|(?:out\s+)?of(?:\s+a\s+possible)?|(?:on\s+a\s+)?scale(?:\s+of|\s+from)?:?\s*\d+\s*(?:-|–|to))"
    r"\s*[*_]*(\d+(?:\.\d+)?)(?![\w]|[.,/]\d)",
    re.IGNORECASE,
)
_REVISED = re.compile(
    r"[^.;\n]{0,60}(?:\b(?:or|maybe|perhaps|vs|versus|revised|changed|between|now|rather|scale)\b[^.;\n]{0,20}\d"
    r"|[(\[]\s*\d+(?:\.\d+)?\s*(?:-|–|to)\s*\d)",
    re.IGNORECASE,
)
_SUMMED = re.compile(
    r"\b(?:total|overall|average)(?:\s+(?:points|rating|grade|mark))?[ *_]*[:=][ *_]*\d",
    re.IGNORECASE,
)
_REFUSED_TAIL = re.compile(
    r"[,.]\s*\d|\s+\d|\w"
    r"|\s*(?:-|–|—|~|\.\.+|to|or|and|through|/|[+*x×^:÷&<>=]|->|→|±)\s*[*_\"'(\[]*[-+]?\d"
    r"|\s*(?:->|→|/|±|\?)|\s*(?:plus|minus|times|hundred|thousand|million|percent\s+of)\b"
    r"|\s*(?:or|to)\s+(?:so|more|less|maybe|even|perhaps|a)\b"
    r"|\s*(?:if|unless|maybe|perhaps|at\s+(?:most|best))\b",
    re.IGNORECASE,
)


def read_score(answer: str, best: float) -> float:
    """Returns the score in an answer as a share of the best one, from 0 to 1.

    Args:
        answer: The judge's text.
        best: The best score that the judge was asked for.

    Raises:
        ValueError: The answer has no score, or one out of its scale.

    Example:
        >>> read_score("Nothing is missing. **Score:** 8/10", best=10)
        0.8
    """
    text = final_part(answer).strip()[-_MAX_CHARS:].translate({0x2212: "-", 0xA0: " "})
    stated = [found for found in _SCORE.finditer(text) if not _PLACEHOLDER.match(text, found.end())]
    if stated:
        last = stated[-1]
        if _SUMMED.search(text, last.end()):
            raise ValueError("a total after the score")
        scale = re.findall(r"\d+", last["label"] or "")
        return _share(text[last.end() :].lstrip(), best, float(scale[-1]) if scale else None)
    bracketed = _BRACKETED.findall(text)
    if bracketed:
        return _share(bracketed[-1], best)
    if _WHOLE.fullmatch(text):
        return _share(text.lstrip("[(*_ #"), best)
    raise ValueError("no score")


def _share(text: str, best: float, scale: float | None = None) -> float:
    found = _NUMBER.match(text)
    if found is None:
        raise ValueError("no number")
    number, tail = float(found["number"]), found["tail"]
    tail = tail[closing.end() :] if (closing := _CLOSING.match(tail)) else tail
    if out_of := _OUT_OF.match(tail):
        scale, tail = float(out_of[1]), tail[out_of.end() :]
    elif percent := re.match(r"\s*%", tail):
        scale, tail = 100.0, tail[percent.end() :]
    if _REFUSED_TAIL.match(tail) or _REVISED.match(tail):
        raise ValueError("more than one number")
    scale = best if scale is None else scale
    if not 0 <= number <= scale or scale <= 0:
        raise ValueError(f"no score from 0 to {scale:g}")
    return number / scale
