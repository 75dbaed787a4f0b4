"""Reads what was added to a log since the last look."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_launch.processes.log_file import rotated

# What every structured line carries and no one wants to read twice.
_BORING = {"event", "level", "timestamp", "component", "service", "run"}

# In place of lines that came faster than they were read.
LOST = b"... lines are missing here: the log was rotated more than once since the last look\n"


class LogPlace:
    """A place in a log, found again after the log has been rotated.

    Example:
        >>> place = LogPlace.end(log)
        >>> ...
        >>> added, complete = place.read()
    """

    def __init__(self, file: Path) -> None:
        """Points to the beginning; the file need not exist yet."""
        self._file = file
        self._inode = 0
        self._offset = 0

    @classmethod
    def end(cls, file: Path) -> LogPlace:
        """Returns the place after all that is there now."""
        place = cls(file)
        with suppress(OSError):
            found = file.stat()
            place._inode, place._offset = found.st_ino, found.st_size
        return place

    def read(self) -> tuple[bytes, bool]:
        """Returns all bytes after this place, and moves there; False: some were lost."""
        complete, parts = True, []
        try:
            with self._file.open("rb") as stream:
                found = os.fstat(stream.fileno())
                if self._inode not in (0, found.st_ino):
                    rest = self._rest_of_rotated()
                    complete = rest is not None
                    parts.append(rest or b"")
                    self._offset = 0
                elif found.st_size < self._offset:  # truncated
                    self._offset = 0
                self._inode = found.st_ino
                stream.seek(self._offset)
                parts.append(stream.read())
                self._offset += len(parts[-1])
        except OSError:
            pass  # not there yet, or being rotated: the next look finds it
        return b"".join(parts), complete

    def _rest_of_rotated(self) -> bytes | None:
        try:
            with rotated(self._file).open("rb") as stream:
                if os.fstat(stream.fileno()).st_ino != self._inode:
                    return None
                stream.seek(self._offset)
                return stream.read()
        except OSError:
            return None


class LogTail:
    """New whole lines of a file that grows and is rotated; it need not exist yet."""

    def __init__(self, file: Path, *, from_end: bool = False) -> None:
        """`from_end` leaves out what the file contains now."""
        self._place = LogPlace.end(file) if from_end else LogPlace(file)
        self._rest = b""

    def read(self) -> list[str]:
        """Lines completed since the last call; a file that was truncated is read from its start."""
        added, complete = self._place.read()
        if not complete:
            self._rest = LOST
        *lines, self._rest = (self._rest + added).split(b"\n")
        # A progress bar draws over itself with carriage returns: its last state is the line.
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]


def read_end(log: Path, limit: int) -> bytes:
    """Returns at most the last `limit` bytes of a log, and of its predecessor while it is short."""
    text = b""
    for file in (log, rotated(log)):
        with suppress(OSError), file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() + len(text) - limit))
            text = stream.read(limit - len(text)) + text
        if len(text) >= limit:
            break
    return text


def _content(line: str) -> dict[str, Any]:
    """A structured line's; empty for any other."""
    with suppress(ValueError):
        content = json.loads(line)
        if isinstance(content, dict) and "event" in content:
            return content
    return {}


def humanize(line: str) -> str:
    """Returns a structured line as `event key=value …`; any other line as it is."""
    if not (content := _content(line)):
        return line.strip()
    values = (f"{key}={value}" for key, value in content.items() if key not in _BORING)
    return " ".join([str(content["event"]), *values])


def last_error(begin: LogPlace, limit: int = 262144) -> str:
    """Returns the gist of a log's last structured error line after `begin`; "" if there is none."""
    lines = begin.read()[0][-limit:].decode(errors="replace").splitlines()
    errors = (line for line in reversed(lines) if _content(line).get("level") == "error")
    return gist(next(errors, ""))


def gist(line: str, limit: int = 300) -> str:
    """Returns a log line's message without its traceback: `event: last line of the exception`."""
    content = _content(line)
    raised = str(content.get("exception") or content.get("error") or "").strip()
    text = f"{content['event']}: {raised.splitlines()[-1]}" if raised else humanize(line)
    return text[:limit]
