"""Rows whose first prompt no server would take, found before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer
from areal.workflows.base import RolloutWorkflow

# Tokens that a server keeps free, and one for an answer.
_RESERVED = 7


def check_prompts(
    workflow: RolloutWorkflow,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Callable[[], Tokenizer],
    context_length: int,
) -> None:
    """Raises an error for the first row that a model cannot answer, as its workflow prompts for it.

    The first row and those that are not surely short enough are tokenized; all of them are where
    the tokenizer has ids that the model lacks. Images count as one token each.

    Args:
        workflow: The workflow, whose `prompt_ids` are asked for.
        rows: The rows; their numbers in the message count from 1.
        tokenizer: Returns the model's tokenizer.
        context_length: The most tokens of a prompt and its answer.

    Raises:
        InvalidInput: A prompt leaves no room for an answer, has an id beyond the model's
            vocabulary, or is malformed.
    """
    if not rows or type(workflow).prompt_ids is RolloutWorkflow.prompt_ids:
        return
    reader: Any = SimpleNamespace(tokenizer=tokenizer())
    known = reader.tokenizer.vocab_size
    odd = max(reader.tokenizer.backend.get_vocab(with_added_tokens=True).values()) >= known
    most, key = context_length, "model.context_length"
    if (longest := reader.tokenizer.longest) is not None and longest < most:
        most, key = longest, "the model's max_position_embeddings"
    shared = 0
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise InvalidInput(f"row {number}: expected a dict, got {type(row).__name__}")
        # A token is a byte at least; the other half is for what the template adds.
        bound = 2 * len(str({**row, "images": None}).encode("utf-8", "replace"))
        if number > 1 and not odd and shared + bound < most - _RESERVED:
            continue
        try:
            ids = workflow.prompt_ids(reader, dict(row))
        except InvalidInput as error:
            raise InvalidInput(f"row {number}: {error}") from None
        if ids is None:
            continue
        if number == 1:
            shared = len(ids)  # the system message, tools and whatever else each prompt has
        if len(ids) > most - _RESERVED:
            raise InvalidInput(
                f"row {number}: a prompt of {len(ids)} tokens leaves no room for an answer, "
                f"expected at most {most - _RESERVED} ({key} = {most})"
            )
        if ids and max(ids) >= known:
            raise InvalidInput(
                f"row {number}: token id {max(ids)}, expected less than {known} (the model's "
                "vocab_size)"
            )
