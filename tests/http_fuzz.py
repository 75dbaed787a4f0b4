"""Requests that no client should send: by schemathesis where there is an OpenAPI document, else by
hypothesis from a valid body; and bytes that are no HTTP at all."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from tests.grpc_fuzz import fuzz_settings

# A handler that is still busy then (a generation, a long poll) is left alone.
CALL_S = 2.0
RAW_S = 0.1
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")

_EDGES = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)),
    *(
        0.0,
        -0.0,
        0.5,
        1e-320,
        1e308,
        -1e308,
        "",
        "x",
        "\x00",
        "0",
        "-1",
        "\U0001f600",
        "a" * 10_000,
    ),
    *(
        "/",
        "/dev/null",
        "/proc/self",
        "../..",
        "\x00/x",
        "http://127.0.0.1:1",
        [],
        {},
        [[]],
        [None],
    ),
]
_VALUES = st.recursive(
    st.sampled_from(_EDGES) | st.integers(-(2**64), 2**64) | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)


def _problem(method: str, path: str, status: int, text: str, allowed: Iterable[int]) -> str:
    if status < 500 or status in allowed:
        return ""
    return f"{method} {path}: HTTP {status}: {text[:500]}"


def fuzz_openapi(url: str, short: int, skip: Iterable[str] = ()) -> list[str]:
    """Every operation of a service's own OpenAPI document, with data that fits and that does not.

    Args:
        url: Of the service, without a path.
        short: Examples per operation and kind in the short form.
        skip: Paths left out (streams).

    Returns:
        One line per server error.
    """
    problems = []
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        if operation.path in skip:
            continue
        for mode in schemathesis.GenerationMode:

            @fuzz_settings(short)
            @given(operation.as_strategy(generation_mode=mode))
            def run(case: schemathesis.Case) -> None:
                answer = case.call(timeout=10)
                line = _problem(case.method, case.path, answer.status_code, answer.text, ())
                assert not line, f"{line}\n{case.as_curl_command()[:1000]}"

            try:
                run()
            except AssertionError as error:
                problems.append(str(error))
            except Unsatisfiable:  # nothing about this operation can be wrong
                pass
    return problems


@st.composite
def _body(draw: Any, seed: Any) -> Any:
    """A valid body with some values replaced, dropped or added; or anything."""
    if seed is None or draw(st.integers(0, 4)) == 0:
        return draw(_VALUES)
    body = copy.deepcopy(seed)
    for _ in range(draw(st.integers(1, 3))):
        at = body
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and draw(st.integers(0, 2)):
                at = at[key]
                continue
            if isinstance(at, dict) and draw(st.integers(0, 5)) == 0:
                del at[key]
            else:
                at[key] = copy.deepcopy(draw(_VALUES))  # an edge may be a list, changed later
            break
    return body


def _encode(value: Any) -> bytes:
    """JSON as clients write it: Python's, which has NaN and half surrogates."""
    import json

    return json.dumps(value).encode(errors="replace")


def fuzz_route(
    url: str,
    method: str,
    path: str,
    seed: Any,
    short: int,
    allowed: Iterable[int] = (),
    headers: Mapping[str, str] | None = None,
) -> str:
    """One route with bodies around `seed`, queries and damaged JSON; tells of a server error."""
    queries = st.dictionaries(
        st.sampled_from(["timeout", "after", "name[]", "x"]) | st.text(max_size=5),
        st.sampled_from(["0", "-1", "nan", "inf", "1e400", "1e-9", "x", "\x00"])
        | st.text(max_size=10),
        max_size=2,
    )
    bodies = st.one_of(
        _body(seed).map(_encode),
        _body(seed).map(_encode),
        st.tuples(_body(seed).map(_encode), st.integers(0, 60)).map(lambda p: p[0][: p[1]]),
        st.binary(max_size=60),
        st.sampled_from([b"", b"[" * 100_000, b'{"a":' * 50_000, b'"' + b"\xff" * 9 + b'"']),
    )
    with httpx.Client(base_url=url, timeout=CALL_S, verify=False, headers=headers) as client:

        @fuzz_settings(short)
        @given(bodies, queries, st.sampled_from(["application/json", "text/plain", "x/y; q"]))
        def run(body: bytes, query: dict[str, str], kind: str) -> None:
            content = b"" if method in ("GET", "HEAD") else body
            try:
                answer = client.request(
                    method, path, params=query, content=content, headers={"Content-Type": kind}
                )
            except httpx.ReadTimeout:
                return
            line = _problem(method, path, answer.status_code, answer.text, allowed)
            assert not line, f"{line}\n{query} {body[:500]!r}"

        try:
            run()
        except AssertionError as error:
            return str(error)
    return ""


_HEAD = b"POST /metrics HTTP/1.1\r\nHost: x\r\n"
_RAW = [
    b"",
    b"\r\n" * 100,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    _HEAD + b"Content-Length: -1\r\n\r\n",
    _HEAD + b"Content-Length: 99999999999999999999\r\n\r\nx",
    _HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nxxxx",
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


def fuzz_socket(url: str, short: int) -> str:
    """Bytes that are no request, or only the beginning of one."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    whole = [b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", _HEAD + b"Content-Length: 2\r\n\r\n{}"]
    sent = st.one_of(
        st.sampled_from(_RAW),
        st.binary(max_size=200),
        st.tuples(st.sampled_from(whole), st.integers(0, 60)).map(lambda p: p[0][: p[1]]),
        st.tuples(st.sampled_from(whole), st.binary(max_size=50)).map(lambda p: p[0] + p[1]),
    )

    @fuzz_settings(short)
    @given(sent)
    def run(data: bytes) -> None:
        with socket.create_connection(address, 5) as connection:
            connection.settimeout(RAW_S)
            try:
                connection.sendall(data)
                answer = connection.recv(4096)
            except (TimeoutError, ConnectionError):
                return
        # 501 and 505 are what HTTP has for methods and versions that a server does not know.
        status = answer[9:12]
        assert not status.startswith(b"5") or status in (b"501", b"505"), (answer, data[:200])

    try:
        run()
    except AssertionError as error:
        return str(error)
    return ""
