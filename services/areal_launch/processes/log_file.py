"""The log of one process: a file that never grows past a limit, and its predecessor.

reward.log      at most LIMIT_BYTES, the newest lines
reward.log.1    at most LIMIT_BYTES, those before; older ones are gone
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

LIMIT_BYTES = 20 * 1024 * 1024


def rotated(file: Path) -> Path:
    """Returns the file with the lines before those of a log."""
    return file.with_name(f"{file.name}.1")


class LogFile:
    """Appends to a log; the one process that writes there owns it.

    A full disk must not end what is logged: what cannot be written is dropped, and counted in the
    log once there is space again.
    """

    def __init__(self, file: Path, limit: int = LIMIT_BYTES) -> None:
        """Opens it; raises OSError when that cannot be."""
        self._file = file
        self._limit = limit
        self._descriptor = self._open()
        self._size = os.fstat(self._descriptor).st_size
        self._dropped = 0
        self._torn = False
        """Whether the last line that was written lacks its end."""

    def write(self, data: bytes) -> None:
        """Appends bytes, as far as there is space."""
        if self._size + len(data) > self._limit:
            # Between two lines, where there is such a place.
            end = data.rfind(b"\n") + 1
            self._append(data[:end])
            self._rotate()
            data = data[end:]
        self._append(data)

    def _append(self, data: bytes) -> None:
        if self._dropped:
            note = {"event": "log_lines_dropped", "level": "warning", "count": self._dropped}
            text = f"{chr(10) if self._torn else ''}{json.dumps(note)}\n".encode()
            if self._put(text):
                self._dropped += data.count(b"\n")
                return
            self._dropped = 0
        left = self._put(data)
        if left:
            self._dropped += max(1, left.count(b"\n"))

    def _put(self, data: bytes) -> bytes:
        """Writes; returns what there was no space for."""
        while data:
            try:
                written = os.write(self._descriptor, data)
            except OSError:
                break
            self._torn = data[written - 1 : written] != b"\n"
            self._size += written
            data = data[written:]
        return data

    def _rotate(self) -> None:
        try:
            with suppress(FileNotFoundError):
                self._file.replace(rotated(self._file))
            fresh = self._open()
        except OSError:
            with suppress(OSError):  # then without its predecessor
                os.ftruncate(self._descriptor, 0)
        else:
            os.close(self._descriptor)
            self._descriptor = fresh
        self._size, self._torn = 0, False

    def _open(self) -> int:
        return os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
