"""What a client of the weight store waits for, and what it takes for an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areal.weights import store_client
from areal.weights.publisher import TransportError
from areal.weights.store_client import StoreConnection

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def store_that(answer: Answer, timeout: float) -> Iterator[StoreConnection]:
    """A connection to a store whose every answer is this one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a caller that gave up
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with StoreConnection(f"http://127.0.0.1:{server.server_port}", {}, timeout) as store:
            yield store
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_commit_when_the_store_hashes_for_longer_than_a_call_may_take_then_waited_for() -> None:
    asked_again = threading.Event()

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        asked_again.wait(1.0)  # much longer than the connection's own deadline
        reply(handler, 200, b'{"path": "/weights/v00000001-inc1"}')

    with store_that(slowly, timeout=0.1) as store:
        assert store.commit("v00000001-inc1", 1 << 20) == "/weights/v00000001-inc1"
        with pytest.raises(TransportError, match="timed out"):
            store.begin("v00000002-inc1", "{}")
        asked_again.set()


@pytest.mark.parametrize("given", ["bytes 0-3/100", "bytes 40-43/100", "", "bytes 4-70/100"])
def test_read_when_other_bytes_than_asked_come_then_refused_before_they_are_taken(
    given: str,
) -> None:
    def other(handler: BaseHTTPRequestHandler) -> None:
        reply(handler, 206, b"xxxx", Content_Range=given)

    target = bytearray(b"....")
    refused = pytest.raises(TransportError, match=r"asked for bytes=4-7, got HTTP 206")
    with store_that(other, timeout=10.0) as store, refused:
        store.read_into("v00000001-inc1", "model.safetensors", 4, memoryview(target))
    assert target == b"...."


def test_call_when_the_one_before_was_refused_at_length_then_it_is_answered() -> None:
    """What is left of a long refusal must not be taken for the next answer."""
    refusals = [b"x" * 100_000]

    def once(handler: BaseHTTPRequestHandler) -> None:
        if refusals:
            reply(handler, 507, refusals.pop())
        else:
            reply(handler, 200, b'{"path": "/weights"}')

    with store_that(once, timeout=10.0) as store:
        with pytest.raises(TransportError, match="HTTP 507"):
            store.commit("v00000001-inc1")
        assert store.commit("v00000001-inc1") == "/weights"


def test_read_when_a_file_is_larger_than_a_chunk_then_asked_for_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_client, "CHUNK_BYTES", 1000)
    file, asked = bytes(n % 251 for n in range(2600)), []

    def ranges(handler: BaseHTTPRequestHandler) -> None:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        asked.append((first, last))
        place = f"bytes {first}-{last}/{len(file)}"
        reply(handler, 206, file[first : last + 1], Content_Range=place)

    with store_that(ranges, 30.0) as store:
        target = bytearray(2500)
        store.read_into("v00000001-inc1", "delta.bin", 100, memoryview(target))
    assert bytes(target) == file[100:]
    assert asked == [(100, 1099), (1100, 2099), (2100, 2599)]
