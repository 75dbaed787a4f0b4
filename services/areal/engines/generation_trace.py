"""The spans of one generation: a segment for each request that brought some of its tokens.

Attributes have the names of OpenTelemetry's conventions for generative AI where those have one:
https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from areal.engines.routing import Server
from areal.observability import tracing
from areal.types import LLMRequest, LLMResponse

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_FINISH = "gen_ai.response.finish_reasons"
_NOT_TRACED: AbstractContextManager[None] = nullcontext()


def generation(
    model: str, request: LLMRequest, response: LLMResponse
) -> AbstractContextManager[None]:
    """The span `generate` around all segments of a request."""
    return _generation(model, request, response) if tracing.recording() else _NOT_TRACED


@contextmanager
def _generation(model: str, request: LLMRequest, response: LLMResponse) -> Iterator[None]:
    gconfig = request.gconfig
    known = len(response.output_tokens)
    with tracing.span("generate") as span:
        if span is None:
            yield
            return
        span.set_attributes(
            _common(model)
            | {
                "gen_ai.request.max_tokens": gconfig.max_new_tokens,
                "gen_ai.request.temperature": 0.0 if gconfig.greedy else gconfig.temperature,
                "gen_ai.request.top_p": gconfig.top_p,
                "areal.resumed_tokens": known,
            }
        )
        try:
            yield
        finally:
            _usage(span, len(request.input_ids), len(response.output_tokens))
            span.set_attribute("areal.interruptions", response.interruptions)
            span.set_attribute(_FINISH, [response.stop_reason.value])


def segment(
    model: str, server: Server, request: LLMRequest, response: LLMResponse
) -> AbstractContextManager[None]:
    """The span `segment` around one request to a server, with what it brought."""
    return _segment(model, server, request, response) if tracing.recording() else _NOT_TRACED


def finished(reason: str) -> None:
    """Notes the finish reason of the segment."""
    tracing.note({_FINISH: [reason]})


@contextmanager
def _segment(
    model: str, server: Server, request: LLMRequest, response: LLMResponse
) -> Iterator[None]:
    at = urlsplit(server.url)
    known = len(response.output_tokens)
    attributes = _common(model) | {
        "server.address": at.hostname or "",
        "server.port": at.port or 0,
        "areal.policy_version": server.version,
    }
    with tracing.span("segment", attributes, client=True) as span:
        try:
            yield
        except BaseException as error:
            if span is not None:
                span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            if span is not None:
                versions = response.output_versions[known:]
                runs = [(version, len(list(run))) for version, run in groupby(versions)]
                _usage(span, len(request.input_ids) + known, len(versions))
                span.set_attribute("areal.token_versions", [version for version, _ in runs])
                span.set_attribute("areal.token_version_counts", [count for _, count in runs])


def _common(model: str) -> dict[str, Any]:
    return {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": model}


def _usage(span: Span, inputs: int, outputs: int) -> None:
    span.set_attribute("gen_ai.usage.input_tokens", inputs)
    span.set_attribute("gen_ai.usage.output_tokens", outputs)
