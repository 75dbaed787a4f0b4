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

    def left(self) -> bool:
        """Whether it has been there."""
        return self._note.exists()

    def lives(self) -> bool:
        try:
            return psutil.Process(int(self._note.read_text())).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def clean_up(self) -> None:
        """For a test that fails: it must not stay."""
        if self.left() and self.lives():
            psutil.Process(int(self._note.read_text())).kill()
