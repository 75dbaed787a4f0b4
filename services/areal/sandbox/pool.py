r"""Programs in boxes, each in a session of its own.

    sandbox = Sandbox()                        # starts nothing
    outcome = await sandbox.run("print(6 * 7)")
    outcome.stdout                             # "42\n"

A program sees the interpreter and its standard library, read-only, an empty folder (its current
one), no network and no other process. It may use what `Limits` allows; what it leaves behind ends
with it. A box is reused: the namespaces of a program are not. docs/isolation.md says what this
keeps out, and what not.

| consumes | waits for | unblocked by |
|---|---|---|
| a box for each of `slots` programs at a time | a free box | a program's end; its limit of time |
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal.errors import CannotStart, InvalidInput, NotFound
from areal.protocol.boxes import Ended, Isolation, Limits, Outcome
from areal.sandbox.box import Box, Command
from areal.sandbox.launch import advice

_GRACE_S = 15.0
"""Seconds added to a program's own time limit, for a busy machine; then the whole box is killed."""


class Sandbox:
    """Runs programs, `slots` at a time; safe to use from any task of one event loop."""

    def __init__(
        self,
        *,
        slots: int = 0,
        packages: Path | None = None,
        isolation: Isolation = "namespaces",
    ) -> None:
        """Starts nothing.

        Args:
            slots: Maximum number of programs at a time; 0: the number of this process's cores.
            packages: A folder of packages (site-packages) that programs may import, read-only.
                If this process runs as root, programs can read only its world-readable files.
            isolation: `rlimits` is a weaker mode for machines without user namespaces
                (docs/isolation.md): no packages, and a new process for each program.
        """
        self._count = slots or len(os.sched_getaffinity(0))
        self._packages, self._isolation = packages, isolation
        self._free: asyncio.Semaphore | None = None
        self._idle: list[Box] = []

    async def run(
        self,
        code: str = "",
        *,
        argv: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
    ) -> Outcome:
        """Runs Python source, or a command, to its end or to a limit.

        Args:
            code: Python source, which runs as `__main__`; set either this or `argv`.
            argv: A command, e.g. `["sh", "-c", "…"]`.
            files: Text files in the program's folder: name to content.
            stdin: The text that the program reads from standard input.
            limits: What the program may use; None: the defaults of `Limits`.

        Raises:
            InvalidInput: Both or neither of `code` and `argv` are set, or a file is outside the
                folder.
            CannotStart: bubblewrap is missing, or this machine does not allow user namespaces.
        """
        if bool(code) == bool(argv):
            raise InvalidInput("Sandbox.run: expected either code or argv")
        limits = limits or Limits()
        if self._free is None:
            self._free = asyncio.Semaphore(self._count)
        async with self._free:
            box = await self._box()
            whole = False
            try:
                async with asyncio.timeout(limits.seconds + _GRACE_S):
                    await box.open(limits)
                    command = await box.run(
                        code, argv=argv, files=files, stdin=stdin.encode(), last=True
                    )
                    outcome, failed = await collect(command)
                    await box.closed()
                whole = self._isolation == "namespaces" and box.running
            except TimeoutError:
                return Outcome(137, "time", "", "the whole box was killed", limits.seconds, 0)
            except NotFound:
                return Outcome(137, "memory", "", "the whole box was killed", 0.0, 0)
            finally:  # also when the caller gives up: what runs must end
                if whole:
                    self._idle.append(box)
                else:
                    await box.close()
        refuse(failed)
        return outcome

    async def close(self) -> None:
        """Ends all idle boxes; those in use end with this process."""
        while self._idle:
            await self._idle.pop().close()

    async def _box(self) -> Box:
        """An idle one, or another; one that has died since is started again."""
        box = self._idle.pop() if self._idle else Box(self._packages, self._isolation)
        if not box.running:
            await box.close()
            await box.start()
        return box


async def collect(command: Command) -> tuple[Outcome, str]:
    """Returns how a command ended, with its output; and why it did not begin, if so."""
    output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    async for event in command.events:
        if isinstance(event, Ended):
            stdout, stderr = (b"".join(parts).decode(errors="replace") for parts in output.values())
            outcome = Outcome(
                event.exit_code, event.cause, stdout, stderr, event.seconds, event.memory
            )
            return outcome, event.failed
        output[event[0]].append(event[1])
    raise AssertionError("a command's events end with its end")


def refuse(failed: str) -> None:
    """Raises what `Ended.failed` says, if it says something.

    Raises:
        InvalidInput: The command, its folder or one of its files is not there.
        CannotStart: The box could not be made.
    """
    if not failed:
        return
    if failed.startswith("program: ") and not failed.startswith("program: MemoryError"):
        raise InvalidInput(f"Sandbox.run: {failed.removeprefix('program: ')}")
    raise CannotStart(f"sandbox: {advice(failed)}")
