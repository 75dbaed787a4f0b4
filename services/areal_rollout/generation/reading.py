"""Reads large answers in threads, because the event loop renews leases and serves all others.

With routes an answer may have 256 MiB. A thread works on drafts, so that a call that is cancelled
meanwhile leaves responses as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from areal.types import LLMResponse
from areal.workflows.large_text import LARGE, apart

_PER_CHARACTER = 16
"""Bytes of JSON and base64 that are read in the time in which a tokenizer reads a character."""
LARGE_ANSWER = LARGE * _PER_CHARACTER
"""Bytes from which an answer is read in a thread."""
P = ParamSpec("P")
T = TypeVar("T")


async def read_apart(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what `work` returns; runs it in a thread if it reads `size` bytes that are large."""
    return await apart(size // _PER_CHARACTER, work, *args, **kwargs)


async def append_apart(
    size: int,
    work: Callable[Concatenate[list[LLMResponse], P], T],
    responses: Sequence[LLMResponse],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """The same for work that appends to responses; if it raises, they may have a part of it.

    Args:
        size: Bytes that it reads.
        work: Gets the responses, or drafts of them, and the other arguments.
        responses: Get what `work` appends.
        args: and `kwargs`, the other arguments.
    """
    if size < LARGE_ANSWER:
        return work(list(responses), *args, **kwargs)
    drafts = [_draft(each) for each in responses]
    found = await read_apart(size, work, drafts, *args, **kwargs)
    for response, draft in zip(responses, drafts, strict=True):
        response.output_tokens[:] = draft.output_tokens
        response.output_logprobs[:] = draft.output_logprobs
        response.output_versions[:] = draft.output_versions
        response.stop_reason = draft.stop_reason
        response.routed_experts = draft.routed_experts
    return found


def _draft(response: LLMResponse) -> LLMResponse:
    return replace(
        response,
        output_tokens=[*response.output_tokens],
        output_logprobs=[*response.output_logprobs],
        output_versions=[*response.output_versions],
    )
