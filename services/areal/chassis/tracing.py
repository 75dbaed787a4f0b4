"""Spans of a trajectory's life, exported by OTLP; docs/tracing.md has them all.

    environment ──> exporting() ──> OpenTelemetry's provider ──> batches ──> collector
                                             ^
    span(), start(), served() ───────────────┘        none is configured: nothing at all

Tracing is on if OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) is set. Otherwise `span_export`
and the SDK are not even imported, and every function here does nothing. The first span of a trace
decides whether the trace is sampled. Without a sampled parent, only a `root` span starts a trace.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Span, SpanContext, Tracer
    from opentelemetry.util.types import Attributes

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADERS = frozenset({"traceparent", "tracestate"})
# One for all: it has no state.
_NOTHING: AbstractContextManager[None] = nullcontext()


# ---------------------------------------------------------------- a process's life


@contextmanager
def exporting(service: str, namespace: str, instance: str = "") -> Iterator[None]:
    """Exports the spans created inside, if the environment names a collector; for a main function.

    Args:
        service: `service.name`, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has one.
        namespace: `service.namespace`: experiment/trial.
        instance: `service.instance.id`; empty: host and process id.

    Raises:
        ConfigError: The endpoint is not a URL, or the protocol is not supported.
    """
    key = next((key for key in _ENDPOINTS if os.environ.get(key)), "")
    if (
        not key
        or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    ):
        yield
        return
    from areal.chassis.span_export import export_spans

    with export_spans(key, service, namespace, instance):
        yield


def enabled() -> bool:
    """Returns whether this process exports spans; only then has it loaded the SDK."""
    return "areal.chassis.span_export" in sys.modules


# ---------------------------------------------------------------- spans


def span(
    name: str,
    attributes: Attributes = None,
    *,
    parent: str | None = None,
    root: bool = False,
    client: bool = False,
) -> AbstractContextManager[Span | None]:
    """A span around a block, the parent of spans created inside; an exception marks it failed.

    Args:
        name: See docs/tracing.md.
        attributes: Attributes that are known at its start.
        parent: W3C traceparent of the span above; None: the current one.
        root: True if it may start a trace.
        client: True if it is a call to another service.

    Returns:
        A context manager that yields the span, or None if nothing is recorded.
    """
    if not enabled():
        return _NOTHING
    from opentelemetry.trace import SpanKind

    context = None if parent is None else _context(parent)
    if not _wanted(context, root):
        return _NOTHING
    kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
    return _tracer().start_as_current_span(name, context, kind, attributes)


def start(
    name: str,
    attributes: Attributes = None,
    *,
    parent: str | None = None,
    root: bool = False,
    start_s: float = 0.0,
    links: Sequence[Span | None] = (),
) -> Span | None:
    """Starts a span that the caller ends, and that does not become the current one.

    Args:
        name: See docs/tracing.md.
        attributes: Attributes that are known at its start.
        parent: As `span`.
        root: As `span`.
        start_s: When it began, seconds since the epoch; 0: now.
        links: Spans of other traces that it belongs to.
    """
    if not enabled():
        return None
    from opentelemetry.trace import Link

    context = None if parent is None else _context(parent)
    if not _wanted(context, root):
        return None
    # Clocks of two machines differ: nothing begins in the future.
    began = min(int(start_s * 1e9), time.time_ns()) if start_s else None
    return _tracer().start_span(
        name,
        context,
        attributes=attributes,
        links=[Link(each.get_span_context()) for each in links if each is not None],
        start_time=began,
    )


def current(span: Span | None) -> AbstractContextManager[Any]:
    """Makes a started span the current one for a block; does not end it."""
    if span is None:
        return _NOTHING
    from opentelemetry.trace import use_span

    return use_span(span, end_on_exit=False)


def note(attributes: Mapping[str, Any]) -> None:
    """Adds attributes to the current span, if there is one."""
    if enabled():
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes(attributes)


def recording() -> bool:
    """Returns whether there is a current span that `note` would add to."""
    if not enabled():
        return False
    from opentelemetry.trace import get_current_span

    return get_current_span().is_recording()


def apart() -> AbstractContextManager[Any]:
    """A block whose spans and calls do not belong to the caller's trace."""
    if not enabled():
        return _NOTHING
    from opentelemetry.context import Context

    return _attached(Context())


# ---------------------------------------------------------------- from process to process


def traceparent(span: Span | None) -> str:
    """Returns a span as W3C text, for the ledger; empty for None."""
    if span is None:
        return ""
    context: SpanContext = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def headers() -> tuple[tuple[str, str], ...]:
    """Headers that continue the current trace elsewhere: of HTTP, or gRPC's metadata."""
    if not enabled():
        return ()
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return tuple(carrier.items())


def served(
    name: str, pairs: Callable[[], Iterable[tuple[str | bytes, str | bytes]]]
) -> AbstractContextManager[Span | None]:
    """A span around a request that carries a trace; nothing around any other.

    Args:
        name: Name of the method or route.
        pairs: Gives the request's headers, in lower case.
    """
    if not enabled():
        return _NOTHING
    carrier = {_text(key): _text(value) for key, value in pairs() if _text(key) in _HEADERS}
    if not carrier:
        return _NOTHING
    from opentelemetry.trace import SpanKind

    context = _propagator().extract(carrier)
    if not _wanted(context, root=False):
        return _attached(context)  # that it is not sampled is known to those behind, too
    return _tracer().start_as_current_span(name, context, SpanKind.SERVER)


# ---------------------------------------------------------------- inside


def _wanted(context: Context | None, root: bool) -> bool:
    """Whether to make a span there; one that begins a trace is the sampler's to decide."""
    from opentelemetry.trace import get_current_span

    above = get_current_span(context).get_span_context()
    return bool(above.trace_flags.sampled) if above.is_valid else root


def _context(parent: str) -> Context:
    return _propagator().extract({"traceparent": parent})


@contextmanager
def _attached(context: Context) -> Iterator[None]:
    from opentelemetry.context import attach, detach

    token = attach(context)
    try:
        yield
    finally:
        detach(token)


@functools.cache
def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("areal")


@functools.cache
def _propagator() -> TextMapPropagator:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
