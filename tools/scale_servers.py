"""Thousands of simulated SGLang servers in one process, for `scale_simulator.py`.

A server answers what weight-sync and rollout workers ask. It generates random tokens at its own
speed (log-normal over the servers; one in fifty is ten times slower); lengths are log-normal. An
update takes a while; each token is labeled with the version that sampled it.

The first `--first` requests of each server only have the rest of a length to go, as if they had
been found running: else all that began together would end together, and what is measured before
half of them have ended would be no steady state.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import uvloop

VOCABULARY = 250
UPDATE_S = 0.05
SPREAD = 0.6
"""Standard deviation of the logarithm of a length."""
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


class Server:
    """The state of one server."""

    def __init__(self, number: int, tokens_per_s: float, median: float, first: int) -> None:
        slow = 0.1 if number % 50 == 49 else 1.0
        self.speed = tokens_per_s * slow * random.lognormvariate(0.0, 0.3)
        self.boot = f"boot-{number}-{random.random()}"
        self.version = "default"
        self.running = 0
        self.requests: dict[str, Callable[[str], None]] = {}
        """Requests by id; an entry ends the request now, with the tokens it has."""
        self._median = median
        self._first = first
        self._changes: list[tuple[float, str]] = []
        """(time, version before it) for each of the recent updates."""

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
        if path == "/abort_request":
            if (end := self.requests.get(body.get("rid", ""))) is not None:
                end("abort")
            return 0.0, {}
        if path in ("/pause_generation", "/continue_generation"):
            return 0.0, {"status": "ok"}
        return 0.0, None

    def generate(self, body: dict[str, Any], answer: Callable[[Any], None]) -> None:
        """Answers when the request has had its time, or is aborted; a batch when all have."""
        params, rid = body["sampling_params"], body.get("rid", "")
        if not isinstance(body["input_ids"][0], list):
            self._generate(params["max_new_tokens"], rid, answer)
            return
        count = len(body["input_ids"])
        answers: dict[int, Any] = {}

        def collect(index: int, one: Any) -> None:
            answers[index] = one
            if len(answers) == count:
                answer([answers[each] for each in range(count)])

        for index in range(count):
            each = params[index] if isinstance(params, list) else params
            self._generate(each["max_new_tokens"], rid[index], partial(collect, index))

    def _generate(self, most: int, rid: str, answer: Callable[[Any], None]) -> None:
        count = 1 if most == 1 else max(1, min(self._length(), most))  # 1: weight-sync's probe
        loop = asyncio.get_running_loop()
        began, seconds = loop.time(), count / self.speed
        self.running += 1

        def end(reason: str) -> None:
            timer.cancel()
            self.running -= 1
            self.requests.pop(rid, None)
            done = count
            if reason == "abort":
                done = min(count, int((loop.time() - began) * self.speed))
            answer(self._answer(began, seconds, count, done, reason))

        timer = loop.call_later(seconds, end, "stop")
        if rid:
            self.requests[rid] = end

    def _length(self) -> int:
        if self._first <= 0:
            return int(random.lognormvariate(0.0, SPREAD) * self._median)
        self._first -= 1
        # What is found running is long (its length weighs in), and somewhere in its middle.
        whole = random.lognormvariate(SPREAD**2, SPREAD) * self._median
        return int(random.random() * whole)

    def _answer(self, began: float, seconds: float, count: int, done: int, reason: str) -> Any:
        spans, start = [], 0
        for at, before in self._changes:
            end = int(count * (at - began) / seconds) if at > began else 0
            if start < end < done:
                spans.append({"version": before, "start": start, "end": end})
                start = end
        spans.append({"version": self.version, "start": start, "end": done})
        tokens = random.choices(range(VOCABULARY), k=done)
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": reason},
                "weight_version": self.version,
                "weight_versions": spans,
                "input_token_logprobs": [[None, 1, None], *([[-1.0, 1, None]] * 15)],
                "output_token_logprobs": [[-1.234567, token, None] for token in tokens],
            },
        }


class Connection(asyncio.Protocol):
    """Speaks as little HTTP as our clients need: one request at a time."""

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
        if path == "/generate":
            self._server.generate(body, self._send)
            return
        seconds, value = self._server.control(path, body)
        asyncio.get_running_loop().call_later(seconds, self._send, value)

    def _send(self, value: Any) -> None:
        status = b"404 Not Found" if value is None else b"200 OK"
        raw = orjson.dumps(value)
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        if not self._transport.is_closing():
            self._transport.write(head % (status, len(raw)) + raw)


async def serve(options: argparse.Namespace) -> None:
    """Listens; prints the ports as JSON."""
    loop, ports = asyncio.get_running_loop(), []
    for number in range(options.count):
        server = Server(number, options.speed, options.tokens, options.first)
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
    parser.add_argument("--first", type=int, default=0, help="requests found running, of each")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(serve(options))


if __name__ == "__main__":
    main()
