"""Where an answer's reasoning ends and its content begins.

    <think> reasoning </think> content

Some chat templates write the opening tag at the end of the prompt, so that an answer begins within
its reasoning. Reasoning that never ends is all of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from areal.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class Parts(NamedTuple):
    """The parts of an answer."""

    reasoning: str
    content: str
    thinking: bool
    """Whether the reasoning has not ended."""


def opens_reasoning(prompt: Sequence[int], tokenizer: Tokenizer, begun: str = "") -> bool:
    """Whether the prompt ends within reasoning: some chat templates end with its opening tag.

    Args:
        prompt: All of it.
        tokenizer: The model's.
        begun: The text with which the agent began the answer, at the prompt's end.
    """
    if OPEN in begun or CLOSE in begun:
        return begun.rfind(OPEN) > begun.rfind(CLOSE)
    if begun:
        return False
    return tokenizer.decode(list(prompt[-8:])).rstrip().endswith(OPEN)


def split_reasoning(text: str, opened: bool) -> Parts:
    """Splits an answer into reasoning and content; `opened`: the prompt opened the reasoning."""
    bare = text.lstrip()
    if not opened and not bare.startswith(OPEN):
        return Parts("", text, False)
    reasoning, closed, content = bare.removeprefix(OPEN).partition(CLOSE)
    return Parts(reasoning, content, not closed)
