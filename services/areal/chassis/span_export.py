"""Exports spans with OpenTelemetry's SDK, set up from its own variables; `tracing` loads it.

A collector that is down, slow or full loses spans and has no other effect. Spans wait in a bounded
queue, which a thread empties in batches; at its end the process waits `FLUSH_S` for that thread.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from areal.errors import ConfigError

FLUSH_S = 2.0
"""Seconds that a process waits at its end for a collector to take the last spans."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def export_spans(key: str, service: str, namespace: str, instance: str) -> Iterator[None]:
    """See `tracing.exporting`; `key` is the variable that has the collector's URL."""
    exporter = _exporter(key)
    provider = TracerProvider(
        resource=_resource(service, namespace, instance), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        if not _finished(provider.shutdown, FLUSH_S):
            _finished(exporter.shutdown, 0.5)  # a collector that is away is not tried again


def _resource(service: str, namespace: str, instance: str) -> Resource:
    """Describes the process that creates the spans; values of the environment take precedence."""
    ours = {
        "service.name": service,
        "service.namespace": namespace,
        "service.instance.id": instance or f"{socket.gethostname()}-{os.getpid()}",
    }
    told = dict(Resource.create().attributes)
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    if not named:
        del told["service.name"]  # the SDK's own: unknown_service
    return Resource({**ours, **told})


def _exporter(key: str) -> SpanExporter:
    endpoint = os.environ[key]
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{key} {endpoint!r}: expected http://host:port or https://host:port")
    by = next((name for name in _PROTOCOLS if os.environ.get(name)), _PROTOCOLS[-1])
    protocol = os.environ.get(by) or "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter()
    raise ConfigError(f"{by} {protocol!r}: expected grpc or http/protobuf")


def _finished(step: Callable[[], Any], timeout: float) -> bool:
    """Whether it ends within so many seconds; what takes longer ends with the process."""
    thread = threading.Thread(target=step, name="areal-last-spans", daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()
