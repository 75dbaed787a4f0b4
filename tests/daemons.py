"""A process that does all it can to stay: forked twice, a session of its own, no environment."""

from __future__ import annotations

from pathlib import Path

import psutil

SOURCE = """
def leave_daemon(note):
    import os
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            with open(note + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(note + ".new", note)
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.waitpid(middle, 0)
"""
"""Defines `leave_daemon(note)`, which writes the daemon's pid to the file `note`."""


class Daemon:
    """One that was left, looked at from outside."""

    def __init__(self, note: Path) -> None:
        self._note = note
        self._process: psutil.Process | None = None

    def left(self) -> bool:
        """Whether it has been; from then on it is known."""
        if self._process is None and self._note.exists():
            self._process = psutil.Process(int(self._note.read_text()))
        return self._process is not None

    def lives(self) -> bool:
        assert self._process is not None
        try:
            return self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def clean_up(self) -> None:
        """For a test that fails: it must not stay."""
        if self.left() and self.lives():
            assert self._process is not None
            self._process.kill()
