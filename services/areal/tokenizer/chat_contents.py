"""Names the message whose content a chat template cannot read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.errors import InvalidInput

if TYPE_CHECKING:
    from areal.tokenizer import Tokenizer


def check_chat(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Any = None, *, added: int = 0
) -> None:
    """Raises the error of `Tokenizer.check_chat`; it names the content that is no text, if any.

    Some templates take a missing content or a number, so only one that fails is asked about.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The conversation.
        tools: What the conversation offers.
        added: How many of the first messages are not the row's.

    Raises:
        InvalidInput: The template refuses the messages or leaves out a part of them.
    """
    try:
        tokenizer.check_chat(messages, tools)
    except InvalidInput as error:
        # The template's error says what it could not do, not with which message.
        if str(error).startswith("messages: "):
            for index, message in enumerate(messages):
                if fault := _fault(message):
                    raise InvalidInput(
                        f"messages[{index - added}].content {fault} ({error})"
                    ) from None
        raise


def _fault(message: Any) -> str:
    """Says what is wrong with a message's content; "": nothing that is known here."""
    if not isinstance(message, Mapping):
        return ""
    content, mine = message.get("content"), message.get("role") == "assistant"
    if content is None and not (mine and message.get("tool_calls")):
        return "None: expected text" + (", or null beside tool_calls" if mine else "")
    return f"{content!r}: expected text" if isinstance(content, (bool, int, float)) else ""
