r"""Where a completion puts its final answer: ``\boxed{}``, ``<answer>``, after ``</think>``."""

from __future__ import annotations

import re
from itertools import pairwise

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(?:\[[^\[\]\n]{0,40}\]\s*){0,2}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# What stands after a box without braces: \boxed18, \boxed\text{18}.
_BARE = re.compile(r"\\[A-Za-z]+\s*(?=\{)|[^\s${}\\]+")
_HEDGED = r"perhaps|maybe|possibly|alternatively"
_BETWEEN = re.compile(
    r"[\s$.]*(?:,|;|\\quad|\\text\{|\}|and|or|either|else|&|\\\)|\\\(|[\s$]"
    rf"|{_HEDGED})*",
    re.IGNORECASE,
)
_JOINS = re.compile(rf",|;|\b(?:and|or|{_HEDGED})\b", re.IGNORECASE)
_SPACE = re.compile(r"^(?:\\quad|\\text\{|\\[(\[ ,;]|[\s}${(])*")
_NEAR = 60
_SPECIAL = re.compile(r"<\|[^|<>\s]{1,40}\|>|</s>|<eos>|<end_of_turn>")
# Of Qwen and most others, Magistral, Gemma 4, gpt-oss.
_BEGINS = ("<think>", "[THINK]", "<|channel>thought", "<|channel|>analysis<|message|>")
_ENDS = ("</think>", "[/THINK]", "<channel|>", "<|channel|>final<|message|>")
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{}`` that is not empty; None if there is no box.

    ``\fbox``, ``\framebox``, spaces before the brace, and a box without braces count. Boxes in one
    enumeration ("\boxed{2} and \boxed{3}") are one answer, "2, 3". If the last box is not closed,
    the answer is cut off, and the result is "". Takes time linear in the length of `text`.
    """
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    closing = _closing_braces(text)
    boxes: list[tuple[int, int, str]] = []
    cut_off = False
    for start in starts:
        begin = start.end()
        cut_off = False
        if text[begin : begin + 1] == "{":
            end = closing.get(begin, -1)
            if end < 0:
                cut_off = True
                continue
            boxes.append((start.start(), end + 1, text[begin + 1 : end]))
        elif bare := _BARE.match(text, begin):
            end = bare.end()
            if text[end : end + 1] == "{":
                end = closing.get(end, len(text) - 1) + 1
            boxes.append((start.start(), end, text[begin:end]))
    boxes = [box for box in boxes if box[2].strip()]
    return ", ".join(_enumerated(text, boxes)) if boxes and not cut_off else ""


def final_part(text: str) -> str:
    """Returns what follows the reasoning, without special tokens."""
    return _SPECIAL.sub("", after_thought(text))


def after_thought(text: str) -> str:
    """Returns the part after the reasoning; "" if that never ends."""
    end = max((at + len(mark) for mark in _ENDS if (at := text.rfind(mark)) >= 0), default=0)
    return text[end:] if end or not any(mark in text for mark in _BEGINS) else ""


def last_tagged(text: str) -> str | None:
    """Returns the content of the last ``<answer>...</answer>``; None if there is none."""
    found = _TAGGED.findall(text) if "</answer>" in text.lower() else []
    return found[-1].strip() if found else None


def _closing_braces(text: str) -> dict[int, int]:
    r"""Returns the position of each group's closing brace; an escaped ``\{`` opens none."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _enumerated(text: str, boxes: list[tuple[int, int, str]]) -> list[str]:
    """Contents of the last box, and of those before it that are joined to it by a comma or word."""
    run = [boxes[-1][2]]
    for (first, end, content), (start, _, _) in reversed(list(pairwise(boxes))):
        if not _joined(text[max(0, first - _NEAR) : first], text[end:start]):
            break
        if content not in run:
            run.insert(0, content)
    return run


def _joined(before: str, between: str) -> bool:
    r"""Whether a box and the next are one enumeration, by the texts before and between them.

    The name of the first may be repeated: "x = \boxed{2} or x = \boxed{3}".
    """
    if len(between) > _NEAR:
        return False
    joins = list(_JOINS.finditer(between))
    if not joins:
        return False
    last = joins[-1]
    name = _SPACE.sub("", between[last.end() :]).rstrip(" \t\n${").casefold()
    named = before.rstrip(" \t\n${").casefold()
    if name and named.endswith(name) and not named.removesuffix(name)[-1:].isalnum():
        between = between[: last.end()]
    return _BETWEEN.fullmatch(between) is not None
