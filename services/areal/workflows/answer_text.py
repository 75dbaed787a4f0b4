"""A sampled answer as text, without special tokens, but with those that mark thoughts and calls.

Families differ in whether such a token is special: Qwen's `<tool_call>` is not, Mistral's
`[TOOL_CALLS]` and Gemma's `<|tool_call>` are. Without it a call could not be told from text.
"""

# ruff: noqa: RUF001 - the names of DeepSeek's tokens

from __future__ import annotations

from collections.abc import Sequence

from areal.tokenizer import Tokenizer

MARKS = (
    "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>",
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<minimax:tool_call>", "</minimax:tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_call|>", "<|/tool_call|>", "<TOOLCALL>", "</TOOLCALL>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>",
    "<function_calls>", "</function_calls>",
)  # fmt: skip
CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
"""gpt-oss's; in a family without the first, the others are something else."""


class AnswerText:
    """Converts the ids of answers to text."""

    def __init__(self, tokenizer: Tokenizer, *, plain: bool = False) -> None:
        """Looks up the marks; `plain`: of an answer without thoughts and calls, which has none."""
        self._tokenizer = tokenizer
        id_of = tokenizer.backend.token_to_id
        marks = () if plain else MARKS if id_of(CHANNELS[0]) is None else (*MARKS, *CHANNELS)
        self._marks = {known for mark in marks if (known := id_of(mark)) is not None}
        self._skips = not any(map(tokenizer.is_special, self._marks))

    def has(self, token_id: int) -> bool:
        """Whether a token is part of the text."""
        return token_id in self._marks or not self._tokenizer.is_special(token_id)

    def of(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        if self._skips:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        return self._tokenizer.decode([each for each in ids if self.has(each)])
