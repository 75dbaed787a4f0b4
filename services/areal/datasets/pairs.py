"""Reads a row of two answers, one of them preferred, in the forms in which such rows come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.errors import InvalidInput
from areal.tokenizer.chat_template import Message, plain_messages


@dataclass(frozen=True)
class PairOfChats:
    """Two whole chats that begin with the same messages."""

    chosen: list[Message]
    rejected: list[Message]
    prompt: int
    """The number of messages that both chats share; the next message of each is the assistant's."""


def split_pair(row: Mapping[str, Any]) -> PairOfChats:
    """Returns the two chats of a row, whatever form its prompt has; see `pair_unit`.

    Raises:
        InvalidInput: A field is missing or malformed, or the chats are not answers to one prompt.
    """
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise InvalidInput(f"row of pairs: no field {key!r}, expected prompt, chosen, rejected")
    chosen, rejected = (_whole(row.get("prompt"), row[key], key) for key in ("chosen", "rejected"))
    for key, chat in (("chosen", chosen), ("rejected", rejected)):
        if chat[-1]["role"] != "assistant":
            raise InvalidInput(f"row of pairs: {key!r} does not end with an assistant's turn")
    shared = _shared(chosen, rejected)
    if shared == len(chosen) == len(rejected):
        shared -= 1  # equal answers: a pair that teaches nothing
    if shared == min(len(chosen), len(rejected)):
        raise InvalidInput(
            "row of pairs: one of 'chosen' and 'rejected' only continues the other, expected two "
            "answers to one prompt"
        )
    heads = [chat[shared]["role"] for chat in (chosen, rejected)]
    if shared == 0 or heads != ["assistant", "assistant"]:
        raise InvalidInput(
            f"row of pairs: 'chosen' and 'rejected' first differ in message {shared}, of roles "
            f"{' and '.join(map(repr, heads))}: expected answers of the assistant to one prompt"
        )
    return PairOfChats(chosen, rejected, shared)


def _whole(prompt: Any, answer: Any, key: str) -> list[Message]:
    """The whole chat of an answer, with the prompt once."""
    said = _messages(answer, "assistant", key)
    if not prompt:
        if isinstance(answer, str):
            raise InvalidInput(
                f"row of pairs: {key!r} is text, so expected a 'prompt' beside it (a chat in one "
                "text must be split into messages)"
            )
        return said
    asked = _messages(prompt, "user", "prompt")
    if _contains(said, asked, isinstance(prompt, str)):
        return said
    begins, ends = said[0]["role"], asked[-1]["role"]
    if begins in ("assistant", "tool") or (begins == "user" and ends == "assistant"):
        return [*asked, *said]
    system = [each for each in asked if each["role"] == "system"]
    if begins == "user" and _begins(said, asked[len(system) :]):
        return [*system, *said]
    raise InvalidInput(
        f"row of pairs: {key!r} begins with a turn of role {begins!r} and does not contain the "
        "'prompt': expected the prompt's messages, or the assistant's answer"
    )


def _contains(said: Sequence[Message], asked: Sequence[Message], text: bool) -> bool:
    """Whether a whole chat has the prompt: at its beginning, or as text of any user's message."""
    if _begins(said, asked) or _begins([m for m in said if m["role"] != "system"], asked):
        return True
    contents = (each.get("content") for each in said if each["role"] == "user")
    wanted = str(asked[0].get("content")).strip()
    return text and any(isinstance(c, str) and c.strip() == wanted for c in contents)


def _begins(whole: Sequence[Message], start: Sequence[Message]) -> bool:
    return not start or _shared(whole, start) == len(start)


def _messages(value: Any, role: str, field: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    try:
        plain_messages([value] if isinstance(value, Mapping) else value)
    except InvalidInput as error:
        raise InvalidInput(f"row of pairs: {field}: {error}") from None
    return [dict(value)] if isinstance(value, Mapping) else [dict(each) for each in value]


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """The number of messages that both begin with."""
    pairs = zip(plain_messages(one), plain_messages(other), strict=False)
    return next(
        (n for n, (a, b) in enumerate(pairs) if a != b),
        min(len(one), len(other)),
    )
