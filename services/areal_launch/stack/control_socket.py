"""A socket in the run folder, through which commands reach the launcher of a running stack.

    areal scale ──{"scale": {"inference": 4}}──> launcher
                <── {"progress": …} as it happens, then {"done": …}, {"refused": …} or {"failed": …}

| who    | consumes     | waits for             | unblocked by                           |
|--------|--------------|-----------------------|----------------------------------------|
| server | one request  | its line, at most 5 s | the client, its end                    |
| client | the answers  | the last one          | it, the end of the stack, its deadline |

Only the stack's owner can open it. A client that goes away stops nothing that has begun.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areal.errors import ArealError, InvalidInput, NotFound, Unavailable, WaitTimeout

Say = Callable[[str], None]
Handler = Callable[[dict[str, Any], Say], Coroutine[Any, Any, str]]
"""Performs a request, reports progress meanwhile, and returns the last line."""

_REQUEST_WITHIN_S = 5.0
_MAX_LINE = 1 << 16


class ControlSocket:
    """Serves requests one after the other, as long as it is open."""

    def __init__(self, file: Path, handler: Handler) -> None:
        self._file = file
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._made: os.stat_result | None = None
        """The socket that this process made."""
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begins to listen, in place of a launcher that died."""
        self._file.unlink(missing_ok=True)
        with _short(self._file) as path:
            before = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(self._serve, path, limit=_MAX_LINE)
            finally:
                os.umask(before)
            self._made = self._file.stat()

    async def close(self) -> None:
        """Stops listening; removes its file, unless another run has made one in its place."""
        if self._made is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(self._made, self._file.stat()):
                    self._file.unlink()
            self._made = None
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: it continues when the client has gone, and ends with the stack.
        task = asyncio.create_task(self._answer(reader, writer), name="control")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(kind: str, text: str) -> None:
            if not writer.is_closing():
                writer.write(json.dumps({kind: text}).encode() + b"\n")

        try:
            async with asyncio.timeout(_REQUEST_WITHIN_S):
                request = json.loads(await reader.readline())
            if not isinstance(request, dict):
                raise InvalidInput("expected a JSON object")
            async with self._one:
                tell("done", await self._handler(request, lambda text: tell("progress", text)))
        except (InvalidInput, ValueError) as error:
            tell("refused", str(error))
        except (ArealError, TimeoutError) as error:
            tell("failed", str(error) or "no request came")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def ask(file: Path, request: dict[str, Any], say: Say, timeout: float) -> str:
    """Sends one request; returns the last word.

    Args:
        file: The socket.
        request: What to do.
        say: Told of what happens meanwhile.
        timeout: Seconds for all of it.

    Raises:
        NotFound: No launcher listens there.
        InvalidInput: The launcher refused; the message is its own.
        ArealError: The launcher tried and failed; the message is its own.
        Unavailable: The stack ended meanwhile.
        WaitTimeout: The launcher did not finish in time.
    """
    loop = asyncio.get_running_loop()
    since = loop.time()
    try:
        with _short(file) as path:
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_LINE)
    except OSError as error:
        raise NotFound(f"{file}: no launcher listens there ({error.strerror or error})") from None
    try:
        async with asyncio.timeout(timeout):
            writer.write(json.dumps(request).encode() + b"\n")
            while line := await reader.readline():
                answer = json.loads(line)
                if "done" in answer:
                    return str(answer["done"])
                if "refused" in answer:
                    raise InvalidInput(str(answer["refused"]))
                if "failed" in answer:
                    raise ArealError(str(answer["failed"]))
                say(str(answer.get("progress", "")))
    except TimeoutError:
        raise WaitTimeout("the launcher's answer", on=str(file), since=since) from None
    finally:
        writer.close()
    raise Unavailable("the stack stopped before it answered")


@contextmanager
def _short(file: Path) -> Any:
    """A path that fits a socket's address (108 bytes), however deep the folder."""
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{file.name}"
    finally:
        os.close(folder)
