"""Is it up yet? One question per kind of server, asked until it says yes or time is over.

A probe returns "" when ready, else why not in a few words. Processes that we did not write cannot
tell us when they are ready, so asking again (with growing pauses) is the only way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from areal.addresses import join_address
from areal.errors import WaitTimeout

Probe = Callable[[], Awaitable[str]]

# SGLang's /health generates a token, and sleeps for a second on the way.
_TRY_S = 5.0


async def _ask(
    host: str, port: int, question: bytes, accept: Callable[[bytes], bool], lines: int = 1
) -> str:
    """Connects, sends `question`, reads so many lines; "" when `accept` likes the last."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_TRY_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(question)
            for _ in range(lines):
                line = await reader.readline()
    except TimeoutError:
        return f"no answer from {join_address(host, port)} within {_TRY_S:.0f} s"
    except OSError as error:
        return f"{join_address(host, port)}: {error.strerror or error}"
    finally:
        if writer is not None:
            writer.close()
    said = line[:80].decode(errors="replace")
    return "" if accept(line) else f"{join_address(host, port)} answered {said!r}"


def http_probe(host: str, port: int, path: str) -> Probe:
    """Returns a probe that is ready when GET answers 200."""
    to = join_address(host, port)
    question = f"GET {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n".encode()
    return lambda: _ask(host, port, question, lambda line: b" 200" in line)


def redis_probe(host: str, port: int, password: str = "") -> Probe:
    """Returns a probe that is ready when PING answers PONG (not while the file is being loaded)."""
    auth = f"*2\r\n$4\r\nAUTH\r\n${len(password)}\r\n{password}\r\n" if password else ""
    question = f"{auth}PING\r\n".encode()
    lines = 2 if password else 1
    return lambda: _ask(host, port, question, lambda line: line.startswith(b"+PONG"), lines)


def nats_probe(host: str, port: int) -> Probe:
    """Returns a probe that is ready when the server sends its greeting."""
    return lambda: _ask(host, port, b"", lambda line: line.startswith(b"INFO "))


async def wait_ready(probe: Probe, what: str, timeout: float) -> None:
    """Asks until the probe says yes.

    Raises:
        WaitTimeout: After `timeout` seconds; names `what` and the probe's last answer.
    """
    since = time.monotonic()
    pause = 0.05
    while answer := await probe():
        if time.monotonic() - since > timeout:
            raise WaitTimeout("readiness", on=what, since=since, hint=answer)
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.5)
