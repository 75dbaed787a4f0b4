"""Several processes behind one port, as a Kubernetes Service has them: a connection goes to one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


@asynccontextmanager
async def one_port(urls: Sequence[str]) -> AsyncIterator[str]:
    """A URL whose connections go to the one of these that listens and has the fewest.

    Where none listens, they are closed.
    """
    backends = [(urlsplit(url).hostname, urlsplit(url).port) for url in urls]
    taken: Counter[tuple[str | None, int | None]] = Counter()
    pairs: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other side was killed
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for backend in sorted(backends, key=lambda each: (taken[each], random.random())):
            with suppress(OSError):
                there, back = await asyncio.open_connection(*backend)
                taken[backend] += 1
                try:
                    await asyncio.gather(pump(reader, back), pump(there, writer))
                finally:
                    taken[backend] -= 1
                return
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        pairs.add(task)
        task.add_done_callback(pairs.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for task in pairs:
            task.cancel()
        await asyncio.gather(*pairs, return_exceptions=True)
