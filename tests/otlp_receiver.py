"""A collector for tests: takes OTLP over gRPC and over HTTP, and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class Span:
    """One span as it came; times in seconds since the epoch."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """Ids of spans of other traces."""

    def __str__(self) -> str:
        return f"{self.start:.3f} {self.end - self.start:7.3f} s {self.service} {self.name}"


class Receiver(pb_grpc.TraceServiceServicer):
    """What came so far."""

    def __init__(self) -> None:
        self.grpc_endpoint = self.http_endpoint = ""
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> Any:
        with self._changed:
            for group in request.resource_spans:
                resource = {each.key: _value(each.value) for each in group.resource.attributes}
                for scope in group.scope_spans:
                    self._spans += [_span(resource, each) for each in scope.spans]
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        with self._changed:
            return list(self._spans)

    def wait(
        self, enough: Callable[[list[Span]], bool], what: str, timeout: float = 90.0
    ) -> list[Span]:
        """The spans, once there are enough."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not enough(self._spans):
                left = deadline - time.monotonic()
                assert left > 0, f"waited {timeout} s for {what}; came: {self.names()}"
                self._changed.wait(left)
            return list(self._spans)

    def names(self) -> list[str]:
        return [span.name for span in self._spans]


def _span(resource: dict[str, Any], span: Any) -> Span:
    return Span(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes={each.key: _value(each.value) for each in span.attributes},
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.path == "/v1/traces"
            if known:
                receiver.Export(pb.ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def start_receiver() -> Iterator[Receiver]:
    """Serves both protocols on loopback."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.grpc_endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(receiver))
    receiver.http_endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiver
    finally:
        http.shutdown()
        http.server_close()
        thread.join(5)
        server.stop(0.5).wait(5)
