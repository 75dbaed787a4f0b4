"""Where an answer's reasoning ends and its content begins.

    <think> reasoning </think> content
    [THINK] reasoning [/THINK] content                      Magistral
    <|channel>thought reasoning <channel|> content          Gemma 4

Some chat templates write the opening tag at the end of the prompt, so that an answer begins within
its reasoning. Reasoning that never ends is all of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from areal.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
THOUGHTS = {OPEN: CLOSE, "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>"}
"""What ends the reasoning that each opening tag begins."""


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
    begins = opening_of(bare, opened)
    if not begins:
        return Parts("", text, False)
    reasoning, closed, content = bare.removeprefix(begins).partition(THOUGHTS[begins])
    return Parts(reasoning, content, not closed)


def opening_of(bare: str, opened: bool) -> str:
    """The tag that opens the reasoning of an answer without blanks at its start; "": none does."""
    return next((tag for tag in THOUGHTS if bare.startswith(tag)), OPEN if opened else "")
