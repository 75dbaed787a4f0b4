"""Client of SandboxService: lends boxes and runs commands in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from areal.clients.base import CallPolicy, Client, Policies, to_duration
from areal.errors import Unavailable
from areal.protocol.boxes import Ended, Limits, Outcome, ended_from_pb, limits_to_pb
from areal.v1 import sandbox_service_pb2 as pb
from areal.v1 import sandbox_service_pb2_grpc as pb_grpc

_MARGIN_S = 60.0
"""Seconds added to a command's own time limit: time to get a box, and for a busy machine."""


class SandboxClient(Client):
    """Lends boxes, and runs programs without one.

    Example:
        >>> client = SandboxClient("127.0.0.1:7005")
        >>> outcome = await client.run("print(6 * 7)")       # a box for this program alone
        >>> async with await client.lend(ttl_s=600) as box:  # one that stays
        ...     await box.write("a.txt", b"hello")
        ...     await box.run(argv=["wc", "-c", "a.txt"])
    """

    POLICIES: ClassVar[Policies] = {
        "CreateSandbox": CallPolicy(60.0, idempotent=False),
        "KeepSandbox": CallPolicy(10.0, 10.0),
        "KillSandbox": CallPolicy(10.0, 10.0),
        "SendInput": CallPolicy(30.0, idempotent=False),
        "ReadFile": CallPolicy(90.0),
        "WriteFile": CallPolicy(90.0),
        "ListFiles": CallPolicy(90.0),
        "RemoveFile": CallPolicy(90.0, idempotent=False),
    }

    @cached_property
    def stub(self) -> pb_grpc.SandboxServiceAsyncStub:
        """Returns the generated client of the service."""
        return pb_grpc.SandboxServiceStub(self._channel)

    async def lend(
        self,
        limits: Limits | None = None,
        *,
        ttl_s: float = 300.0,
        environment: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> LentBox:
        """Lends a box.

        Args:
            limits: What the commands in the box may use; see Limits.
            ttl_s: Seconds until the box is destroyed, unless `keep` postpones that.
            environment: Environment variables of every command.
            metadata: Names and values for people.

        Raises:
            CapacityExceeded: All boxes are lent; `retry_after_s` says when to try again.
            Unavailable: The service does not answer, or it is shutting down.
        """
        request = pb.CreateSandboxRequest(
            limits=limits_to_pb(limits or Limits()),
            ttl=to_duration(ttl_s),
            environment=environment or {},
            metadata=metadata or {},
        )
        made = await self.call(self.stub.CreateSandbox, request)
        return self.box(made.sandbox_id, made.address)

    def box(self, sandbox_id: str, address: str) -> LentBox:
        """Returns a box that is already lent, such as an agent's box for a verifier.

        With TLS, the certificate of the process at `address` must cover the host name in this
        client's address, because certificates do not contain the addresses of pods.
        """
        if address == self.address:
            return LentBox(self, sandbox_id)
        name = self.address.rpartition(":")[0].strip("[]")
        return LentBox(SandboxClient(address, self._security, name=name), sandbox_id, owns=True)

    async def run(
        self,
        code: str = "",
        *,
        argv: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
    ) -> Outcome:
        """Runs a program in a new box, with the arguments and errors of areal.rewards' Sandbox.

        So a client can take the place of a Sandbox, e.g. in `code_reward`.
        """
        limits = limits or Limits()
        request = pb.RunCommandRequest(
            code=code,
            argv=argv,
            files=files or {},
            stdin=stdin.encode(),
            limits=limits_to_pb(limits),
        )
        return await collect(self.events(request, limits.seconds))

    async def events(
        self, request: pb.RunCommandRequest, seconds: float
    ) -> AsyncGenerator[pb.RunCommandResponse, None]:
        """Yields a command's output, then its end; leaving the iterator early ends the command."""
        answers = self.stream(self.stub.RunCommand, request, timeout_s=seconds + _MARGIN_S)
        try:
            async for answer in answers:
                yield answer
        finally:
            await answers.aclose()


class LentBox:
    """A lent box; all clients with its `id` and `address` share its files and processes."""

    def __init__(self, client: SandboxClient, sandbox_id: str, *, owns: bool = False) -> None:
        self.id, self.address = sandbox_id, client.address
        self._client, self._owns = client, owns

    async def __aenter__(self) -> LentBox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def run(
        self,
        code: str = "",
        *,
        argv: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str = "",
    ) -> Outcome:
        """Runs a command to its end.

        Args:
            code: Python source; set either this or `argv`.
            argv: The program and its arguments.
            files: Text files to write before the command starts: name to content.
            stdin: The text that the command reads from standard input.
            limits: `seconds` and `output_kb` of the command; its other limits are the box's.
                None: all limits are the box's.
            environment: Additional environment variables.
            folder: Working folder of the command; empty: the box's folder.

        Raises:
            NotFound: The box has ended.
            InvalidInput: The command, its folder or a file name is not valid.
        """
        request = pb.RunCommandRequest(
            sandbox_id=self.id,
            code=code,
            argv=argv,
            files=files or {},
            stdin=stdin.encode(),
            environment=environment or {},
            folder=folder,
            limits=limits_to_pb(limits) if limits else None,
        )
        return await collect(self.stream(request))

    def stream(self, request: pb.RunCommandRequest) -> AsyncGenerator[pb.RunCommandResponse, None]:
        """Yields a command's output, then its end; sets the request's `sandbox_id`."""
        request.sandbox_id = self.id
        return self._client.events(request, request.limits.seconds or 86_400.0)

    async def send(self, pid: int, data: bytes, *, eof: bool = False) -> None:
        """Adds to the standard input of a command that was started with `keep_stdin`."""
        request = pb.SendInputRequest(sandbox_id=self.id, pid=pid, data=data, eof=eof)
        await self._client.call(self._client.stub.SendInput, request)

    async def read(self, path: str) -> bytes:
        """Returns a file's content; raises NotFound."""
        request = pb.ReadFileRequest(sandbox_id=self.id, path=path)
        return bytes((await self._client.call(self._client.stub.ReadFile, request)).content)

    async def write(self, path: str, content: bytes) -> None:
        """Writes a whole file and creates its folders; CapacityExceeded: the disk is full."""
        request = pb.WriteFileRequest(sandbox_id=self.id, path=path, content=content)
        await self._client.call(self._client.stub.WriteFile, request)

    async def files(self, path: str = "") -> dict[str, str]:
        """Returns a folder's entries: absolute path to file, dir, symlink or other."""
        request = pb.ListFilesRequest(sandbox_id=self.id, path=path)
        found = await self._client.call(self._client.stub.ListFiles, request)
        return {file.path: file.kind for file in found.files}

    async def remove(self, path: str) -> None:
        """Removes a file, or a folder with everything in it; raises NotFound."""
        request = pb.RemoveFileRequest(sandbox_id=self.id, path=path)
        await self._client.call(self._client.stub.RemoveFile, request)

    async def keep(self, ttl_s: float = 300.0) -> None:
        """Makes the lease end `ttl_s` seconds from now; raises NotFound."""
        request = pb.KeepSandboxRequest(sandbox_id=self.id, ttl=to_duration(ttl_s))
        await self._client.call(self._client.stub.KeepSandbox, request)

    async def kill(self) -> bool:
        """Destroys the box; returns False if it had ended already."""
        request = pb.KillSandboxRequest(sandbox_id=self.id)
        try:
            killed = await self._client.call(self._client.stub.KillSandbox, request)
        finally:
            if self._owns:
                await self._client.close()
        return bool(killed.killed)


async def collect(answers: AsyncIterator[pb.RunCommandResponse]) -> Outcome:
    """Returns how a command ended, with its output."""
    stdout, stderr = [], []
    ended: Ended | None = None
    async for answer in answers:
        stdout.append(answer.stdout)
        stderr.append(answer.stderr)
        if answer.HasField("ended"):
            ended = ended_from_pb(answer.ended)
    if ended is None:
        raise Unavailable("sandbox: the call ended before its command did")
    return Outcome(
        ended.exit_code,
        ended.cause,
        b"".join(stdout).decode(errors="replace"),
        b"".join(stderr).decode(errors="replace"),
        ended.seconds,
        ended.memory,
    )
