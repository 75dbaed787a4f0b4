"""A store's real server for tests: a process on a free port, in a temporary folder."""

from __future__ import annotations

import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path

from tests.ports import free_port


class StoreProcess(ABC):
    """One server; may be killed and started again on the same port and files."""

    log = ""
    """The name of its log in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """What is started."""

    @abstractmethod
    def greets(self, connection: socket.socket) -> bool:
        """Whether it answers there as this store does."""

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(self.command())
        deadline = time.monotonic() + 90
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                log = (self.folder / self.log).read_text()[-2000:]
                raise RuntimeError(f"no answer on port {self.port} within 15 s: {log}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9: nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
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
                return self.greets(connection)
        except OSError:
            return False
