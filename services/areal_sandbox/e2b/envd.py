"""envd's services, Process and Filesystem, for one lent box: JSON in, JSON out.

Field names are those of E2B's process.proto and filesystem.proto in JSON.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from areal.errors import InvalidInput, WaitTimeout
from areal.protocol.boxes import Ended
from areal.request_fields import texts_by_name
from areal.sandbox.box import Command
from areal.sandbox.pool import refuse
from areal_sandbox.e2b.connect import AlreadyExists, Json, field
from areal_sandbox.files import Entry, Files
from areal_sandbox.leases import Lease, Leases, running

_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_KILLED_S = 5.0
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL}


class Process:
    """E2B's service `process.Process`: runs commands."""

    def __init__(self, leases: Leases, lease: Lease) -> None:
        self._leases, self._lease = leases, lease
        self.unary: dict[str, Callable[[Json], Awaitable[Json]]] = {
            "List": self.list,
            "SendInput": self.send_input,
            "SendSignal": self.send_signal,
            "CloseStdin": self.close_stdin,
        }

    async def start(self, request: Json, seconds: float) -> AsyncIterator[Json]:
        """Runs a command; it continues if its caller leaves. `seconds`: at most; 0: its lease."""
        if request.get("pty"):
            raise InvalidInput("pty: boxes have no terminals; use commands")
        config = field(request, "process", dict)
        self._leases.admit_command(self._lease)
        command = await self._lease.box.run(
            argv=[field(config, "cmd", str), *map(str, field(config, "args", list, []))],
            keep_stdin=bool(request.get("stdin", True)),
            environment={**self._lease.environment, **texts_by_name(config, "envs")},
            folder=field(config, "cwd", str, ""),
            seconds=seconds,
        )
        async for event in self._events(command, command.events):
            yield event

    async def connect(self, request: Json, _: float) -> AsyncIterator[Json]:
        """Follows a command that runs, from now on."""
        command = self._command(request)
        async for event in self._events(command, command.listen()):
            yield event

    async def stream_input(self, requests: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """Adds to a command's standard input as it comes."""
        command: Command | None = None
        async for request in requests:
            if "start" in request:
                command = self._command(field(request, "start", dict))
            elif "data" in request and command is not None:
                await command.write(_input(field(request, "data", dict)))
        yield {}

    async def list(self, _: Json) -> Json:
        """Returns the commands that are running."""
        return {"processes": [_info(each) for each in self._lease.box.commands.values()]}

    async def send_input(self, request: Json) -> Json:
        """Adds to a command's standard input."""
        await self._command(request).write(_input(request))
        return {}

    async def close_stdin(self, request: Json) -> Json:
        """Ends a command's standard input."""
        await self._command(request).write(b"", eof=True)
        return {}

    async def send_signal(self, request: Json) -> Json:
        """Sends SIGTERM or SIGKILL."""
        name = request.get("signal", "")
        if not isinstance(name, str) or name not in _SIGNALS:
            raise InvalidInput(f"signal {name!r}: expected one of {', '.join(_SIGNALS)}")
        command = self._command(request)
        rest = command.listen()
        await command.signal(_SIGNALS[name])
        if name == "SIGNAL_SIGKILL":  # what was killed is not listed any more
            with suppress(TimeoutError):
                async with asyncio.timeout(_KILLED_S):
                    async for _ in rest:
                        pass
        return {}

    def _command(self, request: Json) -> Command:
        return running(self._lease, field(field(request, "process", dict), "pid", int))

    async def _events(self, command: Command, events: AsyncIterator[Any]) -> AsyncIterator[Json]:
        yield {"event": {"start": {"pid": await command.pid}}}
        async for event in events:
            if not isinstance(event, Ended):
                data = {event[0]: base64.b64encode(event[1]).decode()}
                yield {"event": {"data": data}}
                continue
            refuse(event.failed)
            self._leases.count(event.cause, event.seconds)
            if event.cause == "time":
                raise WaitTimeout("the command to end", hint=f"it had {event.seconds:.1f} s")
            end: Json = {"exitCode": event.exit_code, "exited": True}
            end["status"] = f"exit status {event.exit_code}"
            if event.cause:
                end["error"] = f"the command passed the box's limit: {event.cause}"
            yield {"event": {"end": end}}


class Filesystem:
    """E2B's service `filesystem.Filesystem`: lists and changes files."""

    def __init__(self, lease: Lease) -> None:
        self._files = Files(lease)
        self.unary: dict[str, Callable[[Json], Awaitable[Json]]] = {
            "Stat": self.stat,
            "ListDir": self.list_dir,
            "MakeDir": self.make_dir,
            "Move": self.move,
            "Remove": self.remove,
        }

    async def stat(self, request: Json) -> Json:
        """Returns what a path is."""
        return {"entry": entry(await self._files.stat(field(request, "path", str)))}

    async def list_dir(self, request: Json) -> Json:
        """Returns what is in a folder."""
        depth = field(request, "depth", int, 0) or 1
        found = await self._files.entries(field(request, "path", str), depth)
        return {"entries": [entry(each) for each in found]}

    async def make_dir(self, request: Json) -> Json:
        """Makes a folder and those above it."""
        try:
            return {"entry": entry(await self._files.make_folder(field(request, "path", str)))}
        except InvalidInput as error:
            if "File exists" in str(error):
                raise AlreadyExists(str(error)) from None
            raise

    async def move(self, request: Json) -> Json:
        """Renames a file or folder."""
        source, to = field(request, "source", str), field(request, "destination", str)
        return {"entry": entry(await self._files.move(source, to))}

    async def remove(self, request: Json) -> Json:
        """Removes a file, or a folder with all in it."""
        await self._files.remove(field(request, "path", str))
        return {}


def entry(found: Entry) -> Json:
    """Converts an entry to E2B's EntryInfo."""
    link = {"isSymlink": True, "symlinkTarget": found.target} if found.target else {}
    return {
        "name": PurePosixPath(found.path).name,
        "type": _TYPES.get(found.kind, "FILE_TYPE_UNSPECIFIED"),
        "path": found.path,
        "size": str(found.size),
        "mode": found.mode,
        "permissions": stat.filemode(found.mode)[1:],
        "owner": "user",
        "group": "user",
        "modifiedTime": datetime.fromtimestamp(found.modified, UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z"),
        **link,
    }


def _info(command: Command) -> Json:
    argv, folder = command.request["argv"], command.request["cwd"]
    config: Json = {"cmd": argv[0] if argv else "python", "args": list(argv[1:])}
    config |= {"envs": command.request["env"]} | ({"cwd": folder} if folder else {})
    return {"config": config, "pid": command.pid.result() if command.pid.done() else 0}


def _input(request: Json) -> bytes:
    data = field(field(request, "input", dict), "stdin", str)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InvalidInput(f"input.stdin: {error}: expected base64") from None
