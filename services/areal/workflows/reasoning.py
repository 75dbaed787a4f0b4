"""Where an answer's reasoning ends and its content begins.

    <think> reasoning </think> content
    [THINK] reasoning [/THINK] content                      Magistral
    <|channel>thought reasoning <channel|> content          Gemma 4
    <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant<|channel|>final<|message|> content   gpt-oss, perhaps with several thoughts

Some chat templates write the opening tag at the end of the prompt, so that an answer begins within
its reasoning. Reasoning that never ends is all of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from areal.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
_HEADER = "<|start|>assistant"
_ANALYSIS = "<|channel|>analysis<|message|>"
MESSAGE_END = "<|end|>"
"""Ends a thought of gpt-oss, after which there may be another one."""
THOUGHTS = {
    OPEN: CLOSE,
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    _ANALYSIS: MESSAGE_END,
    _HEADER + _ANALYSIS: MESSAGE_END,
}
"""What ends the reasoning that each opening tag begins."""
CLOSES = tuple(dict.fromkeys(THOUGHTS.values()))
HEADERS = tuple(
    f"{header}<|channel|>{channel}<|message|>"
    for header in ("", _HEADER)
    for channel in ("final", "commentary")
)
"""What is before content that a person reads, in families that write it."""


class Parts(NamedTuple):
    """The parts of an answer."""

    reasoning: str
    content: str
    thinking: bool
    """Whether the reasoning has not ended."""


def has_channels(text: str) -> bool:
    """Whether an answer is in the channels of gpt-oss."""
    return text.lstrip().startswith(("<|channel|>", _HEADER))


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
    """Splits an answer into reasoning and content.

    Args:
        text: The answer.
        opened: Whether it begins within reasoning, which the first closing tag of any family ends.
    """
    thoughts, at = list[str](), len(text) - len(text.lstrip())
    while (tag := opening_of(text, opened and not thoughts, at)) is not None:
        begin = at + len(tag)
        ends = [(text.find(close, begin), close) for close in closes_of(tag)]
        end, close = min((each for each in ends if each[0] >= 0), default=(-1, ""))
        if end < 0:
            return Parts("\n".join([*thoughts, text[begin:]]), "", True)
        thoughts.append(text[begin:end])
        at = end + len(close)
        if close != MESSAGE_END:
            break
    header = next((each for each in HEADERS if text.startswith(each, at)), "")
    content = text[at + len(header) :] if thoughts or header else text
    return Parts("\n".join(thoughts), content, False)


def closes_of(tag: str) -> tuple[str, ...]:
    """What may end the reasoning that `opening_of` found."""
    return (THOUGHTS[tag],) if tag else CLOSES


def opening_of(text: str, opened: bool, at: int = 0) -> str | None:
    """The tag with which reasoning begins there; "": it is before the text; None: none begins."""
    return next((tag for tag in THOUGHTS if text.startswith(tag, at)), "" if opened else None)
