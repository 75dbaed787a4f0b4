"""One box: a process that keeps sessions of commands apart from this machine.

    box = Box()
    await box.start()                    # bubblewrap, and in it an interpreter that forks (zygote)
    await box.open(Limits())             # a session: fresh namespaces and /tmp
    command = await box.run(argv=["sh", "-c", "echo $HOME > x"])
    async for event in command.events: ...
    await box.close()                    # kills all that is inside

A session holds any number of commands, one after the other or side by side; what they leave in
/tmp, and their daemons, stay until it ends. Without namespaces (`rlimits`) a box is a process with
a folder, limits and a filter of system calls.

| consumes                     | waits for            | unblocked by                             |
|------------------------------|----------------------|------------------------------------------|
| a process, memory of its /tmp | the box's answers   | a command's end; the box's; its client |
|                              |                      | sets the deadline                        |
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from areal.errors import CannotStart, InvalidInput, NotFound
from areal.protocol.boxes import Cause, Ended, Isolation, Limits
from areal.sandbox.groups import Group, delegated
from areal.sandbox.launch import NOBODY, advice, bubblewrap, plain
from areal.sandbox.syscalls import seccomp_program

_START_S = 20.0
_END_S = 5.0
_KILLED = 137
Output = tuple[Literal["stdout", "stderr"], bytes]


class Command:
    """A command in a box."""

    def __init__(self, box: Box, number: int, request: Mapping[str, Any]) -> None:
        self.number, self.request = number, request
        self.pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Process id inside the box; 0 if it did not start."""
        self.ended: Ended | None = None
        self._box = box
        self._listeners: list[asyncio.Queue[Output | Ended]] = []
        self.events = self.listen()
        """All events, for the process that started the command."""

    def listen(self) -> AsyncIterator[Output | Ended]:
        """Returns what follows from now on: output, then Ended."""
        queue: asyncio.Queue[Output | Ended] = asyncio.Queue()
        if self.ended is not None:
            queue.put_nowait(self.ended)
        self._listeners.append(queue)

        async def events() -> AsyncIterator[Output | Ended]:
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, Ended):
                    return

        return events()

    def put(self, event: Output | Ended) -> None:
        """Passes an event to all that listen."""
        if isinstance(event, Ended):
            self.ended = event
        for queue in self._listeners:
            queue.put_nowait(event)

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Adds to its standard input (that was kept open), and perhaps ends it."""
        encoded = base64.b64encode(data).decode()
        await self._box.send({"id": self.number, "input": encoded, "eof": eof})

    async def signal(self, number: int) -> None:
        """Sends a signal; SIGKILL to its children as well, except for daemons."""
        await self._box.send({"id": self.number, "signal": number})


class Box:
    """One box; its methods belong to one event loop."""

    def __init__(self, packages: Path | None = None, isolation: Isolation = "namespaces") -> None:
        """Starts nothing. See Sandbox for the arguments."""
        self._packages, self._isolation = packages, isolation
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] | None = None
        self._limits = Limits()
        self._group: Group | None = None
        self._ended_by_kernel = 0
        self.commands: dict[int, Command] = {}
        """Commands that are running."""

    @property
    def running(self) -> bool:
        """Whether its process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the process; no session yet.

        Raises:
            CannotStart: bubblewrap is missing, or this machine allows no user namespaces.
        """
        environment: dict[str, str] | None = None
        if self._isolation == "namespaces":
            command = bubblewrap(self._packages)
            if (place := delegated()) is not None:
                self._group = Group(place)
                command = self._group.enter(command)
        else:
            self._folder = tempfile.TemporaryDirectory(
                prefix="areal-box-", ignore_cleanup_errors=True
            )
            if os.getuid() == 0:
                os.chown(self._folder.name, NOBODY, NOBODY)
            command, environment = plain(self._folder.name)
        program = seccomp_program(only_unix_sockets=self._isolation == "rlimits")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", env=environment
        )
        self._process = process
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(process))
        try:
            async with asyncio.timeout(_START_S):
                await self.send({"seccomp": base64.b64encode(program).decode()})
                await self._ready
        except (TimeoutError, NotFound) as error:
            await self.close()
            said = (await process.stderr.read()).decode(errors="replace") if process.stderr else ""
            silent = f"{error!r}; its process ended with code {process.returncode} and no message"
            raise CannotStart(f"sandbox: {advice(said) or silent}") from None
        except BaseException:
            await self.close()
            raise

    async def open(self, limits: Limits) -> None:
        """Begins a session: fresh namespaces and /tmp; the previous one must have ended."""
        self._limits = limits
        if self._group is not None:
            self._group.limit(limits)
            self._ended_by_kernel = self._group.killed()
        self._closed = asyncio.get_running_loop().create_future()
        wanted = {
            "memory_bytes": limits.memory_mb << 20,
            "processes": limits.processes,
            "disk_bytes": limits.disk_mb << 20,
            "cpu_seconds": limits.cpu_seconds,
        }
        await self.send({"open": wanted})

    async def closed(self) -> None:
        """Returns when the session has ended."""
        if self._closed is not None:
            await self._closed

    async def run(
        self,
        code: str = "",
        *,
        argv: Sequence[str] = (),
        arguments: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        keep_stdin: bool = False,
        environment: Mapping[str, str] | None = None,
        folder: str = "",
        seconds: float = 0.0,
        output_bytes: int = 0,
        last: bool = False,
    ) -> Command:
        """Starts a command in the open session.

        Args:
            code: Python source; runs as `__main__`, with `arguments` in sys.argv.
            argv: A command instead.
            arguments: See code.
            files: Content of text files in the box's folder.
            stdin: What it reads.
            keep_stdin: Whether Command.write will add to it.
            environment: More variables.
            folder: Its current one, absolute or below the box's folder.
            seconds: Of wall time; 0: the session's limit.
            output_bytes: Of stdout and stderr together; 0: the session's limit.
            last: The session ends with this command.

        Raises:
            InvalidInput: Neither or both of code and argv.
            NotFound: The box has ended.
        """
        if bool(code) == bool(argv):
            raise InvalidInput("command: expected either code or argv")
        number = next(self._numbers)
        request = {
            "start": number,
            "code": code,
            "argv": list(argv),
            "args": list(arguments),
            "files": dict(files or {}),
            "env": dict(environment or {}),
            "cwd": folder,
            "seconds": seconds or self._limits.seconds,
            "output_bytes": output_bytes or self._limits.output_kb << 10,
            "last": last,
        }
        command = self.commands[number] = Command(self, number, request)
        try:
            await self.send(request)
            # Not with the request: its process is a fork of the one that reads requests, and must
            # not find in its own memory what a later part of it alone is to read.
            await command.write(stdin, eof=not keep_stdin)
        except BaseException:
            self.commands.pop(number, None)
            raise
        return command

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a request of session.py's protocol; raises NotFound if the box has ended."""
        process = self._process
        if process is None or process.stdin is None:
            raise NotFound("sandbox: the box has ended")
        body = json.dumps(message).encode()
        try:
            process.stdin.write(len(body).to_bytes(4, "big") + body)
            await process.stdin.drain()
        except (ConnectionError, RuntimeError):  # asyncio and uvloop each have their own
            raise NotFound("sandbox: the box has ended") from None

    async def close(self) -> None:
        """Kills it, and with it all that is inside."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert self._reading is not None
        if self._isolation == "rlimits":  # no kernel ends what it started: it does so itself
            process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
        if process.returncode is None:
            process.kill()
        await process.wait()
        process.stdin.close()
        self._reading.cancel()
        self._end("killed")
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Takes its answers until there are none."""
        assert process.stdout is not None
        try:
            while True:
                head = await process.stdout.readexactly(4)
                body = await process.stdout.readexactly(int.from_bytes(head, "big"))
                self._take(json.loads(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._end("memory" if self._process is not None else "killed")  # the kernel took it

    def _take(self, message: dict[str, Any]) -> None:
        """An answer: of the zygote, or of a session."""
        if "ready" in message and self._ready is not None:
            self._ready.set_result(None)
        elif "closed" in message and self._closed is not None:
            self._closed.set_result(None)
            self._end_commands("killed", "")
        elif "failed" in message:
            self._end_commands("", str(message["failed"]))
        elif (command := self.commands.get(message.get("id", 0))) is None:
            return
        elif "pid" in message:
            command.pid.set_result(message["pid"])
        elif "ended" in message:
            del self.commands[command.number]
            ended = Ended(**message["ended"])
            killed = ended.exit_code == _KILLED and not ended.cause
            if killed and self._group and self._group.killed() > self._ended_by_kernel:
                ended = replace(ended, cause="memory")
            command.put(ended)
        elif "stdout" in message:
            command.put(("stdout", base64.b64decode(message["stdout"])))
        else:
            command.put(("stderr", base64.b64decode(message["stderr"])))

    def _end_commands(self, cause: Cause, failed: str) -> None:
        """The session has ended, and all that ran in it."""
        commands, self.commands = self.commands, {}
        for command in commands.values():
            # What a program that runs does to its box is no failure of the machine.
            began = command.pid.done()
            if not began:
                command.pid.set_result(0)
            ended = cause or ("killed" if began else "")
            command.put(Ended(137, ended, 0.0, 0, "" if began else failed))

    def _end(self, cause: Cause) -> None:
        """The process has ended."""
        self._end_commands(cause, "")
        for waited in (self._ready, self._closed):
            if waited is not None and not waited.done():
                waited.set_exception(NotFound("sandbox: the box has ended"))
                waited.exception()  # no one may wait for it
