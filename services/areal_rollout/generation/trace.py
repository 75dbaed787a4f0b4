"""The spans of one generation: a segment for each request that brought some of its tokens.

Attributes have the names of OpenTelemetry's conventions for generative AI where those have one:
https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

from areal.chassis import tracing
from areal.types import LLMRequest, LLMResponse
from areal_rollout.generation.routing import Server

_OPERATION = "text_completion"
_FINISH = "gen_ai.response.finish_reasons"
_NOT_TRACED: AbstractContextManager[None] = nullcontext()


def generation(
    model: str, request: LLMRequest, responses: Sequence[LLMResponse]
) -> AbstractContextManager[None]:
    """Opens the span `generate` around all segments of a request, for one answer or a group."""
    return _generation(model, request, responses) if tracing.recording() else _NOT_TRACED


@contextmanager
def _generation(
    model: str, request: LLMRequest, responses: Sequence[LLMResponse]
) -> Iterator[None]:
    gconfig = request.gconfig
    known = _tokens(responses)
    with tracing.span("generate") as span:
        if span is None:
            yield
            return
        try:
            yield
        finally:
            span.set_attributes(
                {
                    "gen_ai.operation.name": _OPERATION,
                    "gen_ai.request.model": model,
                    "gen_ai.request.max_tokens": gconfig.max_new_tokens,
                    "gen_ai.request.temperature": 0.0 if gconfig.greedy else gconfig.temperature,
                    "gen_ai.request.top_p": gconfig.top_p,
                    "gen_ai.usage.input_tokens": len(request.input_ids) * len(responses),
                    "gen_ai.usage.output_tokens": _tokens(responses),
                    _FINISH: [response.stop_reason.value for response in responses],
                    "areal.resumed_tokens": known,
                    "areal.interruptions": sum(response.interruptions for response in responses),
                }
            )


def segment(
    model: str, server: Server, request: LLMRequest, responses: Sequence[LLMResponse]
) -> AbstractContextManager[None]:
    """Opens the span `segment` around one request to a server, with its result."""
    return _segment(model, server, request, responses) if tracing.recording() else _NOT_TRACED


def finished(reasons: list[str]) -> None:
    """Notes the finish reasons of the segment, one per answer."""
    tracing.note({_FINISH: reasons})


@contextmanager
def _segment(
    model: str, server: Server, request: LLMRequest, responses: Sequence[LLMResponse]
) -> Iterator[None]:
    known = [len(response.output_tokens) for response in responses]
    failure = ""
    with tracing.span("segment", client=True) as span:
        try:
            yield
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            if span is not None:
                span.set_attributes(_of_segment(model, server, request, responses, known, failure))


def _of_segment(
    model: str,
    server: Server,
    request: LLMRequest,
    responses: Sequence[LLMResponse],
    known: Sequence[int],
    failure: str,
) -> dict[str, Any]:
    """Returns what a segment added to the `known` tokens before it."""
    at = urlsplit(server.url)
    # A server's version only rises.
    versions = sorted(
        version
        for response, count in zip(responses, known, strict=True)
        for version in response.output_versions[count:]
    )
    runs = [(version, len(list(run))) for version, run in groupby(versions)]
    attributes = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": len(request.input_ids) * len(responses) + sum(known),
        "gen_ai.usage.output_tokens": len(versions),
        "server.address": at.hostname or "",
        "server.port": at.port or 0,
        "areal.token_versions": [version for version, _ in runs],
        "areal.token_version_counts": [count for _, count in runs],
    }
    return attributes | {"error.type": failure} if failure else attributes


def _tokens(responses: Sequence[LLMResponse]) -> int:
    return sum(len(response.output_tokens) for response in responses)
