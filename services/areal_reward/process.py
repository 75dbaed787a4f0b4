"""One worker process, as the pool sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import orjson

import areal_reward
from areal.chassis.logging import get_logger
from areal.chassis.process import signal_name
from areal.errors import CannotStart, Unavailable, WaitTimeout
from areal.sandbox.launch import NAMESPACES, confine, variables
from areal.security import without_secrets
from areal_reward import frames
from areal_reward.children import Children
from areal_reward.config import RewardConfig
from areal_reward.frames import Kind
from areal_reward.progress import Progress

_END_S = 5.0
_PATIENCE = 20
"""A worker's start may take this many times `load_timeout_s`: on a starved machine, another attempt
would take as long again."""


def _environment() -> dict[str, str]:
    """Returns a worker's environment, without secrets: user code runs there.

    A collector's API key (OTEL_...) is a secret, too. What user code prints is written at once: the
    process may be ended at any time.
    """
    known = without_secrets(os.environ)
    kept = {name: value for name, value in known.items() if not name.startswith("OTEL_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


class WorkerProcess:
    """A started worker: frames in, frames out, and an end that cannot be refused."""

    def __init__(
        self, process: asyncio.subprocess.Process, progress: Progress, children: Children
    ) -> None:
        self._process = process
        self._children = children
        self._recipe = ""
        self.progress = progress

    @classmethod
    async def start(cls, config: RewardConfig, children: Children) -> WorkerProcess:
        """Starts a worker and waits until its imports are done.

        Args:
            config: Its limits.
            children: Starts it, and ends what it leaves behind.

        Raises:
            Unavailable: The process ended instead; its output is in the log.
            CannotStart: The same in a box, or there is no bubblewrap.
            WaitTimeout: The process was not ready within `_PATIENCE` times `load_timeout_s`.
        """
        progress, file = Progress.create()
        with file:
            descriptor = file.fileno()
            boxed = config.isolation == "sandbox"
            root = str(Path(areal_reward.__file__).parents[1])
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [
                sys.executable,
                "-m",
                "areal_reward.worker",
                "1" if boxed else str(os.getpid()),  # its parent: there pid 1 of the box
                str(descriptor),
                str(config.timeout_s),
                str(config.memory_mb),
            ]
            environment, inherited = _environment(), [descriptor]
            if boxed:
                environment = variables("/tmp", "/usr/local/bin:/usr/bin:/bin", "")  # noqa: S108
                environment["PYTHONUNBUFFERED"] = "1"
                folders = [*path.split(os.pathsep), sys.prefix, sys.base_prefix]
                command, rules = confine(command, folders, config.memory_mb)
                inherited.append(rules)
            try:
                process = await children.start(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    pass_fds=inherited,
                    start_new_session=True,  # user code's children end with it
                    limit=1 << 20,
                    # One arena: threads would otherwise reserve 64 MiB of address space each.
                    env={
                        **environment,
                        "PYTHONPATH": path,
                        "OMP_NUM_THREADS": "1",
                        "MALLOC_ARENA_MAX": "1",
                    },
                )
            finally:
                for rest in inherited[1:]:
                    os.close(rest)
        worker = cls(process, progress, children)
        try:
            first = await worker._first(config.load_timeout_s)
        except WaitTimeout:
            await worker.end()
            raise
        except BaseException:
            worker.kill()
            raise
        if first is None or first[0] is not Kind.READY:
            how = await worker.end()
            if boxed:
                raise CannotStart(
                    f"reward.isolation sandbox: a worker did not start: {how} (its output is in "
                    f"the log); {NAMESPACES}"
                )
            raise Unavailable(f"reward worker did not start: {how}")
        return worker

    async def _first(self, usual_s: float) -> tuple[Kind, bytes] | None:
        """Returns the first frame; says every `usual_s` seconds that it still waits for it."""
        log, since = get_logger(__name__), time.monotonic()
        reading = asyncio.ensure_future(self.read())
        try:
            for _ in range(_PATIENCE):
                await asyncio.wait({reading}, timeout=usual_s)
                if reading.done():
                    return reading.result()
                log.warning(
                    "worker_starts_slowly",
                    waited_s=round(time.monotonic() - since),
                    hint="its imports have not ended; is this machine or its disk overloaded?",
                )
        finally:
            reading.cancel()
        raise WaitTimeout("a reward worker to start", since=since)

    def accepts(self, digest: str) -> bool:
        """Whether it may run functions of that recipe ("": built-in); a worker has one recipe only.

        What one has changed in the process, or taken of its memory, is no other one's.
        """
        return not digest or self._recipe in ("", digest)

    async def send(self, request: bytes, digest: str, recipe: tuple[str, bytes] | None) -> None:
        """Writes a ScoreRequest, and its recipe where this worker has not had it yet.

        Returns when the pipe has taken it; a worker that died shows at the next `read`.
        """
        self._children.reap()
        stdin = self._process.stdin
        assert stdin is not None
        if recipe is not None and digest != self._recipe:
            body = orjson.dumps({"file_name": recipe[0], "source": recipe[1].decode()})
            stdin.write(frames.frame(Kind.RECIPE, body))
            self._recipe = digest
        stdin.write(frames.frame(Kind.SCORE, request))
        try:
            await stdin.drain()
        except (ConnectionError, RuntimeError):  # asyncio and uvloop each have their own
            return

    async def read(self) -> tuple[Kind, bytes] | None:
        """Returns the next frame; None when the worker has ended or sends something else."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            length, kind = frames.HEADER.unpack(await stdout.readexactly(frames.HEADER.size))
            if length > frames.MAX_BODY_BYTES:
                return None
            return Kind(kind), await stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return None

    def kill(self) -> None:
        """Ends it and all it has started, at once; idempotent."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    async def end(self) -> str:
        """Kills it and what it left, and says how it ended: "exit code 3", "signal SIGSEGV"."""
        if self._process.returncode is None:
            # End of file arrives a moment before the exit status.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 0.2)
        self.kill()
        try:
            code = await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            return f"pid {self._process.pid} survives SIGKILL"
        await self._children.end_strays()
        if code >= 0:
            return f"exit code {code}"
        return f"signal {signal_name(-code)}"
