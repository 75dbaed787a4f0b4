"""Turns chats into token ids, with the assistant's turns marked for fine-tuning.

If the template marks them itself (`{% generation %}`), its marks are used. Otherwise they are found
by rendering: an assistant's turn is the part of the conversation after the prompt for that turn.

    <|user|>2+2=<|assistant|>4<|end|><|user|>3+3=<|assistant|>6<|end|>
                             xxxxxxxx                         xxxxxxxx
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.errors import InvalidInput

if TYPE_CHECKING:
    from areal.tokenizer import Tokenizer

Tokens = dict[str, list[Any]]
Unit = list[Tokens]
"""What is trained on as one: a sequence {"input_ids", "loss_mask"}, or a chosen and a rejected
one."""


def chat_unit(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> Unit:
    """Returns a tokenized conversation for `OfflineTrainer`; the loss covers all assistant turns.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The {"role", "content"} objects of the conversation.

    Raises:
        InvalidInput: No message has the role `assistant`, or the tokens of an assistant turn cannot
            be identified, for example because the chat template changes it in later prompts.
    """
    return [_sequence(tokenizer, messages, _turns(messages))]


def pair_unit(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Unit:
    """Returns a chosen and a rejected conversation; the loss covers the last turn of each.

    Args:
        tokenizer: A tokenizer with a chat template.
        row: A row with the fields `prompt`, `chosen` and `rejected`. Each is text or a list of
            messages. `prompt` may be missing if the other two begin with the prompt's messages.

    Raises:
        InvalidInput: `chosen` or `rejected` is missing or does not end with an assistant turn, or
            the tokens of that turn cannot be identified, as in `chat_unit`.
    """
    both = []
    for key in ("chosen", "rejected"):
        if key not in row:
            raise InvalidInput(f"row of pairs: no field {key!r}, expected prompt, chosen, rejected")
        messages = [*_messages(row.get("prompt", []), "user"), *_messages(row[key], "assistant")]
        turns = _turns(messages)
        if turns[-1:] != [len(messages) - 1]:
            raise InvalidInput(f"row of pairs: {key!r} does not end with an assistant's turn")
        both.append(_sequence(tokenizer, messages, turns[-1:]))
    return both


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _turns(messages: Sequence[dict[str, Any]]) -> list[int]:
    return [n for n, message in enumerate(messages) if message.get("role") == "assistant"]


def _sequence(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], turns: Sequence[int]
) -> Tokens:
    if not turns:
        raise InvalidInput("messages: no assistant turn, so there is nothing to learn")
    text, spans = _marked(tokenizer, messages, turns) or _differences(tokenizer, messages, turns)
    encoded = tokenizer.backend.encode(text, add_special_tokens=False)
    mask = [False] * len(encoded.ids)
    for begin, end in spans:
        inside = [n for n, (b, e) in enumerate(encoded.offsets) if begin <= b < e <= end]
        # What a template puts behind the end of a turn, no server would wait for.
        last = max((n for n in inside if encoded.ids[n] in tokenizer.eos_token_ids), default=None)
        for n in inside:
            mask[n] = last is None or n <= last
    if mask[:1] == [True]:
        mask[0] = False  # nothing predicts a first token
    return {"input_ids": list(encoded.ids), "loss_mask": mask}


def _marked(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], turns: Sequence[int]
) -> tuple[str, list[tuple[int, int]]] | None:
    """The text and the turns that the template itself marks; None: it marks none."""
    parts = tokenizer.render_marked(messages)
    if len(parts) == 1:
        return None
    spans, length = [], 0
    for number, part in enumerate(parts):
        if number % 2:
            spans.append((length, length + len(part)))
        length += len(part)
    every = _turns(messages)
    if len(spans) != len(every):
        raise InvalidInput(
            f"messages: the chat template marks {len(spans)} of {len(every)} assistant turns, "
            "expected all"
        )
    return "".join(parts), [spans[every.index(turn)] for turn in turns]


def _differences(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], turns: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    whole = tokenizer.render_chat(messages, add_generation_prompt=False)
    spans = []
    for turn in turns:
        before = tokenizer.render_chat(messages[:turn], add_generation_prompt=True)
        after = tokenizer.render_chat(messages[: turn + 1], add_generation_prompt=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise InvalidInput(
                f"messages[{turn}]: the chat template changes this turn in the prompts of later "
                "turns (some templates drop earlier reasoning), so its tokens cannot be "
                "identified; expected a template with {% generation %} marks, or a row that ends "
                "with this turn"
            )
        spans.append((len(before), len(after)))
    return whole, spans
