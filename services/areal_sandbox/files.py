"""Files of a lent box, read and written by programs inside it.

No process outside the box, and none of its own two, opens a path that code in it may have
prepared: a symlink to anywhere leads where the code itself may go.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from areal.errors import CapacityExceeded, InvalidInput, NotFound
from areal.protocol.boxes import Ended
from areal_sandbox.leases import Lease

MAX_BYTES = 64 << 20
"""Largest file, in bytes, that is read or written in one call."""
_SECONDS = 60.0
_FRAME = """
import sys
del sys.path[0]  # what lies in the box's folder is no module of this program
import json, os, shutil, stat
def entry(path):
    s = os.lstat(path)
    kind = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}
    return {"path": os.path.abspath(path), "kind": kind.get(stat.S_IFMT(s.st_mode), "other"),
            "size": s.st_size, "mode": s.st_mode & 0o7777, "modified": s.st_mtime,
            "target": os.readlink(path) if stat.S_ISLNK(s.st_mode) else ""}
def parents(path):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
path = os.path.expanduser(sys.argv[1])
try:
    DO
except OSError as error:
    sys.stderr.write(error.strerror or "")
    sys.exit(error.errno)
"""
_READ = """
    with open(path, "rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
"""
_WRITE = """
    parents(path)
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
    json.dump([entry(path)], sys.stdout)
"""
_LIST = """
    depth, found = int(sys.argv[2]), []
    def walk(folder, level):
        for name in sorted(os.listdir(folder)):
            inner = os.path.join(folder, name)
            found.append(entry(inner))
            if level < depth and found[-1]["kind"] == "dir":
                walk(inner, level + 1)
    walk(path, 1)
    json.dump(found, sys.stdout)
"""
_STAT = """
    json.dump([entry(path)], sys.stdout)
"""
_REMOVE = """
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)
"""
_MAKE = """
    os.makedirs(path)
    json.dump([entry(path)], sys.stdout)
"""
_MOVE = """
    parents(os.path.expanduser(sys.argv[2]))
    os.rename(path, os.path.expanduser(sys.argv[2]))
    json.dump([entry(os.path.expanduser(sys.argv[2]))], sys.stdout)
"""


@dataclass(frozen=True)
class Entry:
    """A file, folder or link in a box."""

    path: str
    """Absolute."""
    kind: str
    """file, dir, symlink or other."""
    size: int
    mode: int
    modified: float
    """Unix time, in seconds."""
    target: str
    """Target of a symlink."""


class Files:
    """The files of a lease. Paths are absolute, or below the box's folder.

    Every method raises NotFound for a path that is not there, InvalidInput for one that is of the
    wrong kind or not allowed, and CapacityExceeded for a full disk or a file that is too large.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    async def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        return await self._run(_READ, [path])

    async def write(self, path: str, content: bytes) -> Entry:
        """Writes a whole file; folders above it are made."""
        if len(content) > MAX_BYTES:
            raise CapacityExceeded(f"{path}: {len(content)} bytes; at most {MAX_BYTES} in one call")
        return (await self._made(_WRITE, [path], content))[0]

    async def entries(self, path: str, depth: int = 1) -> list[Entry]:
        """Returns what is in a folder, down to `depth` levels."""
        return await self._made(_LIST, [path or ".", str(depth)])

    async def stat(self, path: str) -> Entry:
        """Returns what a path is; a link is not followed."""
        return (await self._made(_STAT, [path]))[0]

    async def remove(self, path: str) -> None:
        """Removes a file, or a folder with all in it."""
        await self._run(_REMOVE, [path])

    async def make_folder(self, path: str) -> Entry:
        """Makes a folder and those above it; raises InvalidInput if it is there."""
        return (await self._made(_MAKE, [path]))[0]

    async def move(self, path: str, to: str) -> Entry:
        """Renames a file or folder; folders above the new name are made."""
        return (await self._made(_MOVE, [path, to]))[0]

    async def _made(self, what: str, arguments: Sequence[str], stdin: bytes = b"") -> list[Entry]:
        return [Entry(**each) for each in json.loads(await self._run(what, arguments, stdin))]

    async def _run(self, what: str, arguments: Sequence[str], stdin: bytes = b"") -> bytes:
        if "\0" in "".join(arguments):
            raise InvalidInput("path: expected no null byte")
        command = await self._lease.box.run(
            _FRAME.replace("\n    DO\n", what),
            arguments=arguments,
            stdin=stdin,
            seconds=_SECONDS,
            output_bytes=MAX_BYTES,
        )
        parts, said = [], b""
        async for event in command.events:
            if isinstance(event, Ended):
                _refuse(event, arguments[0], said.decode(errors="replace"))
            elif event[0] == "stdout":
                parts.append(event[1])
            else:
                said += event[1]
        return b"".join(parts)


def _refuse(ended: Ended, path: str, said: str) -> None:
    """Raises what the program's end means, if it failed."""
    code = ended.exit_code
    if ended.cause or ended.failed:
        why = f"the limit of {ended.cause}" if ended.cause else ended.failed
        raise CapacityExceeded(f"{path}: the access was ended by {why}")
    if code == errno.ENOENT:
        raise NotFound(f"{path}: {said}")
    if code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        raise CapacityExceeded(f"{path}: {said}")
    if code:
        raise InvalidInput(f"{path}: {said.strip()[-300:] or os.strerror(code)}")
