"""SandboxService: convert, call the leases, convert."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc

from areal.chassis.waits import Waits
from areal.errors import InvalidInput
from areal.protocol.boxes import Ended, ended_to_pb, limits_from_pb
from areal.sandbox.box import Command
from areal.sandbox.pool import refuse
from areal.v1 import sandbox_service_pb2 as pb
from areal.v1 import sandbox_service_pb2_grpc as pb_grpc
from areal_sandbox.files import Files
from areal_sandbox.leases import Lease, Leases, running

_Context = grpc.aio.ServicerContext[Any, Any]


class SandboxService(pb_grpc.SandboxServiceServicer):
    """Lends boxes, and runs commands in them."""

    def __init__(self, leases: Leases, address: str, waits: Waits) -> None:
        """Takes the core, where others reach this process, and the record of waits."""
        self._leases, self._address, self._waits = leases, address, waits

    async def CreateSandbox(  # noqa: N802
        self, request: pb.CreateSandboxRequest, context: _Context
    ) -> pb.CreateSandboxResponse:
        """Lends a box to the caller."""
        limits = limits_from_pb(request.limits)
        with self._waits.on("box", "bubblewrap"):
            lease = await self._leases.create(
                limits,
                request.ttl.ToMilliseconds() / 1000,
                dict(request.environment),
                dict(request.metadata),
            )
        return pb.CreateSandboxResponse(sandbox_id=lease.id, address=self._address)

    async def KeepSandbox(  # noqa: N802
        self, request: pb.KeepSandboxRequest, context: _Context
    ) -> pb.KeepSandboxResponse:
        """Puts a lease's end off."""
        self._leases.keep(request.sandbox_id, request.ttl.ToMilliseconds() / 1000)
        return pb.KeepSandboxResponse()

    async def KillSandbox(  # noqa: N802
        self, request: pb.KillSandboxRequest, context: _Context
    ) -> pb.KillSandboxResponse:
        """Ends a lease; one that has ended is no error."""
        return pb.KillSandboxResponse(killed=await self._leases.kill(request.sandbox_id))

    async def RunCommand(  # noqa: N802
        self, request: pb.RunCommandRequest, context: _Context
    ) -> AsyncIterator[pb.RunCommandResponse]:
        """Runs a command; a caller that goes away ends it."""
        if bool(request.code) == bool(request.argv):
            raise InvalidInput("command: expected either code or argv")
        if not request.sandbox_id:
            yield await self._once(request)
            return
        limits_from_pb(request.limits)  # or it raises
        lease = self._leases.get(request.sandbox_id)
        self._leases.admit_command(lease)
        command = await _start(lease, request)
        try:
            yield pb.RunCommandResponse(pid=await command.pid)
            async for event in command.events:
                if isinstance(event, Ended):
                    refuse(event.failed)
                    self._leases.count(event.cause, event.seconds)
                    yield pb.RunCommandResponse(ended=ended_to_pb(event))
                elif event[0] == "stdout":
                    yield pb.RunCommandResponse(stdout=event[1])
                else:
                    yield pb.RunCommandResponse(stderr=event[1])
        finally:
            if command.ended is None and lease.box.running:
                await command.signal(signal.SIGKILL)

    async def SendInput(  # noqa: N802
        self, request: pb.SendInputRequest, context: _Context
    ) -> pb.SendInputResponse:
        """Adds to a command's standard input."""
        command = running(self._leases.get(request.sandbox_id), request.pid)
        await command.write(request.data, eof=request.eof)
        return pb.SendInputResponse()

    async def ReadFile(  # noqa: N802
        self, request: pb.ReadFileRequest, context: _Context
    ) -> pb.ReadFileResponse:
        """Returns a file's content."""
        return pb.ReadFileResponse(content=await self._files(request).read(request.path))

    async def WriteFile(  # noqa: N802
        self, request: pb.WriteFileRequest, context: _Context
    ) -> pb.WriteFileResponse:
        """Writes a whole file."""
        await self._files(request).write(request.path, request.content)
        return pb.WriteFileResponse()

    async def ListFiles(  # noqa: N802
        self, request: pb.ListFilesRequest, context: _Context
    ) -> pb.ListFilesResponse:
        """Returns what is in a folder."""
        found = await self._files(request).entries(request.path)
        files = [pb.SandboxFile(path=each.path, kind=each.kind, size=each.size) for each in found]
        return pb.ListFilesResponse(files=files)

    async def RemoveFile(  # noqa: N802
        self, request: pb.RemoveFileRequest, context: _Context
    ) -> pb.RemoveFileResponse:
        """Removes a file or a folder."""
        await self._files(request).remove(request.path)
        return pb.RemoveFileResponse()

    def _files(self, request: Any) -> Files:
        return Files(self._leases.get(request.sandbox_id))

    async def _once(self, request: pb.RunCommandRequest) -> pb.RunCommandResponse:
        """A command without a lease: its whole output, and its end."""
        if request.environment or request.folder or request.keep_stdin:
            raise InvalidInput(
                "sandbox_id '': expected a lent box for environment, folder and keep_stdin"
            )
        with self._waits.on("command", "a free box"):
            outcome = await self._leases.once(
                request.code,
                list(request.argv),
                dict(request.files),
                request.stdin.decode(errors="replace"),
                limits_from_pb(request.limits),
            )
        ended = Ended(outcome.exit_code, outcome.cause, outcome.seconds, outcome.memory)
        return pb.RunCommandResponse(
            stdout=outcome.stdout.encode(),
            stderr=outcome.stderr.encode(),
            ended=ended_to_pb(ended),
        )


async def _start(lease: Lease, request: pb.RunCommandRequest) -> Command:
    return await lease.box.run(
        request.code,
        argv=request.argv,
        files=request.files,
        stdin=request.stdin,
        keep_stdin=request.keep_stdin,
        environment={**lease.environment, **request.environment},
        folder=request.folder,
        seconds=request.limits.seconds,
        output_bytes=request.limits.output_kb << 10,
    )
