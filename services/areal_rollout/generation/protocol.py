"""SGLang's /generate: builds requests, and checks that answers are valid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from areal import images
from areal.errors import InvalidInput, PromptTooLong
from areal.model_directory import RouteShape
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal_rollout.generation.routes import Routing

_FINAL = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class ServerError(Exception):
    """A server gave an answer that no healthy server gives."""


class ServerBusy(ServerError):
    """A healthy server whose queue is full."""


@dataclass(frozen=True)
class ModelLimits:
    """Limits of every server, checked here because a bad request can kill a server."""

    vocab_size: int
    context_length: int
    """Longest prompt and output together, in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    model: str = ""
    """The model's name, for traces."""
    routes: RouteShape | None = None
    """Shape of a mixture of experts whose servers are asked which experts they chose; None: they
    are not asked."""

    def room(self, prompt: int) -> int:
        """Returns how many tokens may follow a prompt of that length; below 1: it is too long.

        SGLang takes prompts up to `context_length` - 7, and what an interrupted request continues
        from is a prompt: so no output may grow beyond that.
        """
        return self.context_length - 6 - prompt

    def check(self, request: LLMRequest) -> None:
        """Raises InvalidInput for a request that no server should receive."""
        ids = request.input_ids
        if not ids:
            raise InvalidInput("input_ids: empty, expected at least one token")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise InvalidInput(f"input_ids: token id {bad} is outside 0..{self.vocab_size - 1}")
        if self.room(len(ids)) < 1:
            raise PromptTooLong(
                f"input_ids: a prompt of {len(ids)} tokens leaves no room in a context of "
                f"{self.context_length}",
                tokens=len(ids),
                limit=self.context_length,
            )
        if request.gconfig.max_new_tokens < 1:
            raise InvalidInput(
                f"gconfig.max_new_tokens {request.gconfig.max_new_tokens}: expected 1 or more"
            )


def sampling_params(
    gconfig: GenerationHyperparameters,
    limits: ModelLimits,
    sampled: int,
    room: int,
    stream_interval: int = 0,
    grammar: str = "",
) -> dict[str, Any]:
    """Returns SGLang's `sampling_params` for the rest of a request.

    Args:
        gconfig: The workflow's settings.
        limits: For the end-of-sequence tokens.
        sampled: Tokens that the request already has.
        room: Tokens it may still get.
        stream_interval: Tokens between two events; 0: no stream.
        grammar: See `LLMRequest.grammar`.
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
    if stream_interval:
        params["stream_interval"] = stream_interval
    if grammar:
        params["structural_tag"] = grammar
    return params


def request_body(
    request: LLMRequest,
    responses: Sequence[LLMResponse],
    rids: Sequence[str],
    *,
    extra_key: str,
    limits: ModelLimits,
    most: int,
    stream_interval: int,
    adapter: str = "",
    routing: Routing | None = None,
) -> bytes:
    """The body of /generate for what is left of some answers to one prompt.

    Several are a batch with an id each, and not SGLang's `n`: its samples get ids of their own,
    which /abort_request does not know, and all begin at the prompt.

    Args:
        request: What to generate.
        responses: Answers to the same request so far; generation continues after their tokens.
        rids: One per response.
        extra_key: Requests share prompt work only below the same one.
        limits: The model's limits.
        most: Tokens of one whole answer.
        stream_interval: Tokens between two events; 0: no stream.
        adapter: Name of the adapter to compute with: a server that holds several versions as
            adapters computes with version 0 if none is named. Empty: the server's weights.
        routing: Routes to ask for.
    """
    prompts = [[*request.input_ids, *response.output_tokens] for response in responses]
    sampled = [len(response.output_tokens) for response in responses]
    params = [
        sampling_params(
            request.gconfig, limits, count, most - count, stream_interval, request.grammar
        )
        for count in (sampled if any(sampled) else sampled[:1])
    ]
    single = len(responses) == 1
    # Each image is one token of the prompt, and the server fills in as many as it takes.
    urls = [images.data_url(each) for each in request.images]
    seen = {"image_data": urls if single else [urls] * len(responses)} if urls else {}
    return orjson.dumps(
        {
            **seen,
            **({"lora_path": adapter} if adapter else {}),
            **(routing.fields if routing else {}),
            "rid": rids[0] if single else rids,
            "input_ids": prompts[0] if single else prompts,
            "extra_key": extra_key,
            "sampling_params": params[0] if len(params) == 1 else params,
            "return_logprob": True,
            "stream": stream_interval > 0,
        }
    )


def append_answers(
    responses: Sequence[LLMResponse],
    raw: bytes,
    min_version: int,
    vocab_size: int,
    routing: Routing | None = None,
    *,
    sampled_by: int | None = None,
) -> list[str]:
    """Checks the answer to a /generate call, and appends its tokens.

    Args:
        responses: Get the tokens, logprobs, versions, and the stop reason unless it was aborted.
        raw: Body of the answer: an object for one response, else an array of them.
        min_version: A token of an older version means that the server lied about its own.
        vocab_size: Token ids are below it.
        routing: Routes that were asked for; None: none were.
        sampled_by: Version of the adapter that the request named, which sampled every token,
            whatever the server meanwhile says of itself; None: the answer says which did.

    Returns:
        Types of the finish reasons: "stop", "length" or "abort".

    Raises:
        InvalidInput: The server refuses the request.
        ServerError: The answer is not what the protocol says; nothing was appended.
    """
    with _believing(raw):
        answers = orjson.loads(raw)
        if isinstance(answers, dict):
            answers = [answers]
            if "error" in answers[0]:  # how a stream says it, with status 200
                error = answers[0]["error"]
                if isinstance(error, dict) and error.get("code") == 400:
                    raise InvalidInput(f"the server refuses the request: {error_message(raw)}")
                raise ServerError(error_message(raw))
        if len(answers) != len(responses):
            raise ServerError(f"{len(answers)} answers, expected {len(responses)}")
        segments = [_Segment.read(answer, vocab_size, sampled_by) for answer in answers]
    for segment in segments:
        segment.check(min_version)
    for response, segment, answer in zip(responses, segments, answers, strict=True):
        segment.append_to(response)
        if routing is not None:
            routing.add(response, answer)
    return [segment.finish for segment in segments]


def tokens_of(raw: bytes) -> list[int]:
    """Returns the token ids of an event of a stream; raises ServerError."""
    with _believing(raw):
        answer = orjson.loads(raw)
        return [] if "error" in answer else list(answer["output_ids"])


def append_event(
    responses: Sequence[LLMResponse],
    raw: bytes,
    version: int,
    min_version: int,
    vocab_size: int,
    routing: Routing | None = None,
    *,
    sampled_by: int | None = None,
) -> int:
    """Appends what the newest event of a broken stream says of one answer, perhaps all of it.

    Args:
        responses: As in `append_answers`; the one of the event.
        raw: The event.
        version: The version that sampled its tokens; the last event states it itself.
        min_version: As in `append_answers`.
        vocab_size: As there.
        routing: As there.
        sampled_by: As there.

    Returns:
        How many tokens.

    Raises:
        ServerError: As `append_answers`.
    """
    with _believing(raw):
        answer = orjson.loads(raw)
        if answer["meta_info"]["finish_reason"] is not None:
            segment = _Segment.read(answer, vocab_size, sampled_by)
        else:
            tokens, logprobs = _sampled(answer, vocab_size)
            segment = _Segment("abort", tokens, logprobs, [version] * len(tokens))
    segment.check(min_version)
    (response,) = responses
    segment.append_to(response)
    if routing is not None:
        routing.add(response, answer)
    return len(segment.tokens)


@dataclass(slots=True)
class _Segment:
    """What one call brought of one answer."""

    finish: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]

    @classmethod
    def read(cls, answer: Any, vocab_size: int, sampled_by: int | None) -> _Segment:
        """Reads a finished answer; raises InvalidInput if it says that the request is refused."""
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort" and finish.get("status_code") == 400:
            # A stream has no status to say it with. This server's grammar backend, for one.
            raise InvalidInput(f"the server refuses the request: {finish.get('message')}")
        versions: list[int] = []
        for span in meta.get("weight_versions") or ():
            if span["start"] != len(versions) or span["end"] < span["start"]:
                raise ServerError(f"weight_versions {span!r} leave a gap")
            versions += [int(span["version"])] * (span["end"] - span["start"])
        tokens, logprobs = _sampled(answer, vocab_size)
        if sampled_by is not None:
            versions = [sampled_by] * len(tokens)
        return cls(finish["type"], tokens, logprobs, versions)

    def check(self, min_version: int) -> None:
        """Raises ServerError for values that no healthy server returns."""
        versions = self.versions
        if self.tokens and not versions:
            raise ServerError(
                "meta_info has no weight_versions, which say which weights sampled each token: "
                "expected SGLang 0.5.19 or newer"
            )
        if len(versions) != len(self.tokens):
            raise ServerError(f"weight_versions cover {len(versions)} of {len(self.tokens)} tokens")
        if versions and min(versions) < min_version:
            raise ServerError(
                f"sampled at version {min(versions)}, but listed at {min_version} or newer"
            )
        if self.finish != "abort" and self.finish not in _FINAL:
            raise ServerError(f"unknown finish_reason {self.finish!r}")

    def append_to(self, response: LLMResponse) -> None:
        response.output_tokens += self.tokens
        response.output_logprobs += self.logprobs
        response.output_versions += self.versions
        response.stop_reason = _FINAL.get(self.finish, StopReason.ABORT)


def _sampled(answer: Any, vocab_size: int) -> tuple[list[int], list[float]]:
    """Returns tokens and logprobs that belong together, from 0 to the vocabulary's end."""
    tokens: list[int] = answer["output_ids"]
    entries = answer["meta_info"]["output_token_logprobs"]
    logprobs = [float(entry[0]) for entry in entries]
    if [entry[1] for entry in entries] != tokens or not all(map(math.isfinite, logprobs)):
        raise ServerError("output_token_logprobs do not belong to output_ids")
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise ServerError(f"token id outside 0..{vocab_size - 1}")
    return tokens, logprobs


@contextmanager
def _believing(raw: bytes) -> Iterator[None]:
    """Context in which an answer of a wrong shape counts as the server's error."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ServerError(
            f"unusable answer ({type(error).__name__}: {error}): {raw[:200]!r}"
        ) from None


def error_message(raw: bytes) -> str:
    """The readable part of an error body, in any of SGLang's shapes."""
    try:
        value = orjson.loads(raw)
        error = value.get("error", value)
        text = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        text = raw[:500].decode(errors="replace")
    return " ".join(str(text).split())[:500]


def refusal(status: int, raw: bytes) -> ServerError:
    """The error of an answer that is neither 200 nor 400."""
    message = error_message(raw)
    # A load balancer's 429; SGLang's 503 has these words (without, it starts or stops).
    busy = status == 429 or (status == 503 and "queue is full" in message)
    return (ServerBusy if busy else ServerError)(f"HTTP {status}: {message}")
