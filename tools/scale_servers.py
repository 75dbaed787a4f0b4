"""Thousands of simulated SGLang servers in one process, for `scale_simulator.py`.

A server answers what weight-sync and rollout workers ask. It generates random tokens at its own
speed (log-normal over the servers; one in fifty is ten times slower); lengths are log-normal. An
update takes a while; each token is labelled with the version that sampled it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import resource
import sys
from collections.abc import Callable
from typing import Any

import orjson
import uvloop

VOCABULARY = 250
UPDATE_S = 0.05
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


class Server:
    """One server's state."""

    def __init__(self, number: int, tokens_per_s: float, lengths: Callable[[], int]) -> None:
        slow = 0.1 if number % 50 == 49 else 1.0
        self.speed = tokens_per_s * slow * random.lognormvariate(0.0, 0.3)
        self.boot = f"boot-{number}-{random.random()}"
        self.version = "default"
        self.running = 0
        self.lengths = lengths
        self._changes: list[tuple[float, str]] = []
        """(time, version before it): of the recent updates."""

    def control(self, path: str, body: dict[str, Any]) -> tuple[float, Any]:
        """(seconds, answer) of anything but /generate; None for what is not known."""
        now = asyncio.get_running_loop().time()
        if path == "/model_info":
            return 0.0, {"weight_version": self.version}
        if path == "/server_info":
            return 0.0, {"boot_id": self.boot}
        if path == "/v1/loads":
            return 0.0, {"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]}
        if path == "/weights_checker":
            return 0.0, {"ranks": [{"checksums": {"all": self.version}}]}
        if path == "/update_weights_from_disk":
            self._changes = [*self._changes[-20:], (now, self.version)]
            self.version = body["weight_version"]
            return UPDATE_S, {"success": True, "message": ""}
        if path in ("/pause_generation", "/continue_generation", "/abort_request"):
            return 0.0, {"status": "ok"}
        return 0.0, None

    def begin(self, body: dict[str, Any]) -> tuple[float, Callable[[], Any]]:
        """(seconds, then the answer) of /generate."""
        params = body["sampling_params"]
        count = max(1, min(self.lengths(), params["max_new_tokens"]))
        if params["max_new_tokens"] == 1:  # weight-sync's probe
            count = 1
        began, seconds = asyncio.get_running_loop().time(), count / self.speed
        self.running += 1
        return seconds, lambda: self._answer(body, began, seconds, count)

    def _answer(self, body: dict[str, Any], began: float, seconds: float, count: int) -> Any:
        self.running -= 1
        spans, start = [], 0
        for at, before in self._changes:
            end = int(count * (at - began) / seconds) if at > began else 0
            if start < end < count:
                spans.append({"version": before, "start": start, "end": end})
                start = end
        spans.append({"version": self.version, "start": start, "end": count})
        tokens = random.choices(range(VOCABULARY), k=count)
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": tokens[-1]},
                "weight_version": self.version,
                "weight_versions": spans,
                "input_token_logprobs": [[None, 1, None], *([[-1.0, 1, None]] * 15)],
                "output_token_logprobs": [[-1.234567, token, None] for token in tokens],
            },
        }


class Connection(asyncio.Protocol):
    """As little HTTP as our clients speak: one request at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        """Remembers where answers go."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """A request, or a part of it."""
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        path = head.split(b" ", 2)[1].decode()
        body = orjson.loads(rest[:length]) if length else {}
        loop = asyncio.get_running_loop()
        if path == "/generate":
            seconds, answer = self._server.begin(body)
            loop.call_later(seconds, lambda: self._send(answer()))
            return
        seconds, value = self._server.control(path, body)
        loop.call_later(seconds, self._send, value)

    def _send(self, value: Any) -> None:
        status = b"404 Not Found" if value is None else b"200 OK"
        raw = orjson.dumps(value)
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        if not self._transport.is_closing():
            self._transport.write(head % (status, len(raw)) + raw)


async def serve(options: argparse.Namespace) -> None:
    """Listens; prints the ports as JSON."""

    def length() -> int:
        return int(random.lognormvariate(0.0, 0.6) * options.tokens)

    loop, ports = asyncio.get_running_loop(), []
    for number in range(options.count):
        server = Server(number, options.speed, length)
        listener = await loop.create_server(
            lambda server=server: Connection(server), "127.0.0.1", 0, backlog=1024
        )
        ports.append(listener.sockets[0].getsockname()[1])
    print(orjson.dumps(ports).decode(), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until our parent is gone


def main() -> None:
    """Runs until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tokens", type=float, default=64, help="median length of an answer")
    parser.add_argument("--speed", type=float, default=30, help="tokens per second of a request")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(serve(options))


if __name__ == "__main__":
    main()
