"""SGLang's /generate: what is asked, and what an answer must look like to be believed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import orjson

from areal.types import GenerationHyperparameters, LLMResponse, StopReason

FINAL = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class ServerError(Exception):
    """A server did what no healthy one does."""


@dataclass(frozen=True)
class ModelLimits:
    """What every server accepts; checked here since a bad request can kill a server."""

    vocab_size: int
    context_length: int
    """Prompt and output together, in tokens."""
    eos_token_ids: tuple[int, ...] = ()

    def room(self, prompt: int) -> int:
        """Tokens that may follow a prompt of so many; below 1: it is too long.

        SGLang takes prompts up to `context_length` - 7, and what an interrupted request goes on
        from is a prompt: so no output may grow beyond that.
        """
        return self.context_length - 6 - prompt


def sampling_params(
    gconfig: GenerationHyperparameters, limits: ModelLimits, sampled: int, room: int
) -> dict[str, Any]:
    """SGLang's `sampling_params` for what is left of a request.

    Args:
        gconfig: As the workflow asked.
        limits: For the end-of-sequence tokens.
        sampled: Tokens that the request already has.
        room: Tokens it may still get.
    """
    params: dict[str, Any] = {
        "max_new_tokens": room,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "stop_token_ids": [*gconfig.stop_token_ids, *limits.eos_token_ids],
    }
    if gconfig.min_new_tokens > sampled:
        params["min_new_tokens"] = min(gconfig.min_new_tokens - sampled, room)
    if gconfig.top_p < 1.0:
        params["top_p"] = gconfig.top_p
    if gconfig.top_k > 0:
        params["top_k"] = gconfig.top_k
    return params


def append_answer(response: LLMResponse, raw: bytes, min_version: int, vocab_size: int) -> str:
    """Checks one /generate answer and appends its tokens.

    Args:
        response: Gets the tokens, logprobs and versions.
        raw: Body of the answer.
        min_version: A token of an older version means that the server lied about its own.
        vocab_size: Token ids are below it.

    Returns:
        Type of the finish reason: "stop", "length" or "abort".

    Raises:
        ServerError: The answer is not what the protocol says; nothing was appended.
    """
    try:
        answer = orjson.loads(raw)
        meta = answer["meta_info"]
        tokens: list[int] = answer["output_ids"]
        finish: str = meta["finish_reason"]["type"]
        count = len(tokens)
        entries = meta["output_token_logprobs"]
        logprobs = [float(entry[0]) for entry in entries]
        same = count == len(entries) and all(
            entry[1] == token for entry, token in zip(entries, tokens, strict=True)
        )
        versions: list[int] = []
        for span in meta.get("weight_versions") or ():
            if span["start"] != len(versions) or span["end"] < span["start"]:
                raise ServerError(f"weight_versions {meta['weight_versions']!r} leaves a gap")
            versions += [int(span["version"])] * (span["end"] - span["start"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ServerError(
            f"unusable answer ({type(error).__name__}: {error}): {raw[:200]!r}"
        ) from None
    if not same or not all(map(math.isfinite, logprobs)):
        raise ServerError("output_token_logprobs do not belong to output_ids")
    if len(versions) != count:
        raise ServerError(f"weight_versions cover {len(versions)} of {count} tokens")
    if count and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise ServerError(f"token id outside 0..{vocab_size - 1}")
    if count and min(versions) < min_version:
        raise ServerError(f"sampled at version {min(versions)}, listed at {min_version} or more")
    if finish != "abort" and finish not in FINAL:
        raise ServerError(f"unknown finish_reason {finish!r}")
    response.output_tokens += tokens
    response.output_logprobs += logprobs
    response.output_versions += versions
    return finish


def error_message(raw: bytes) -> str:
    """The readable part of an error body, in any of SGLang's shapes."""
    try:
        value = orjson.loads(raw)
        error = value.get("error", value)
        text = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        text = raw[:500].decode(errors="replace")
    return " ".join(str(text).split())[:500]
