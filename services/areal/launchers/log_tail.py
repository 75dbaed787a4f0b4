"""Reads what was added to a log since the last look."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

# What every structured line carries and nobody wants to read twice.
_BORING = {"event", "level", "timestamp", "component", "service", "run"}


class LogTail:
    """New whole lines of a file that grows; it need not exist yet."""

    def __init__(self, file: Path, *, from_end: bool = False) -> None:
        """`from_end`: leave out what is there now."""
        self._file = file
        self._position = file.stat().st_size if from_end and file.is_file() else 0
        self._rest = b""

    def read(self) -> list[str]:
        """Lines completed since the last call; a file that was truncated is read anew."""
        try:
            with self._file.open("rb") as stream:
                if self._file.stat().st_size < self._position:
                    self._position, self._rest = 0, b""
                stream.seek(self._position)
                added = stream.read()
        except OSError:
            return []
        self._position += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        # A progress bar draws over itself with carriage returns: its last state is the line.
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]


def humanize(line: str) -> str:
    """A structured line as `event key=value …`; any other line as it is."""
    try:
        content = json.loads(line)
    except ValueError:
        return line.strip()
    if not isinstance(content, dict) or "event" not in content:
        return line.strip()
    values = (f"{key}={value}" for key, value in content.items() if key not in _BORING)
    return " ".join([str(content["event"]), *values])


def last_error(log: Path, begin: int, limit: int = 262144) -> str:
    """The gist of a log's last structured line of level error after byte `begin`; "": none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(begin, log.stat().st_size - limit))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict) and content.get("level") == "error":
                return gist(line)
    return ""


def gist(line: str, limit: int = 300) -> str:
    """What a log line says, without its traceback: `event: last line of the exception`."""
    try:
        content = json.loads(line)
    except ValueError:
        return line.strip()[:limit]
    if not isinstance(content, dict) or "event" not in content:
        return line.strip()[:limit]
    raised = str(content.get("exception") or content.get("error") or "").strip()
    text = f"{content['event']}: {raised.splitlines()[-1]}" if raised else humanize(line)
    return text[:limit]
