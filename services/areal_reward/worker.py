"""The worker process: reads requests, calls reward functions one after another, writes results.

    stdin  ──> SCORE ──> load (once per spec) ──> item 0, item 1, … ──> RESULTS … DONE ──> pipe
                              |                       |
                              v                       v
                       progress: LOADING        progress: position

Pure Python processes with pipes: no pickle, no fork of a threaded service. What user code prints
goes to the service's log, as descriptor 1 is the log's and the pipe has a number of its own.
Asynchronous functions run concurrently, each step of each one noted like a synchronous call.

| it waits for | unblocked by                                             |
|--------------|----------------------------------------------------------|
| a request    | the pool; end of file (the pool is gone) ends the worker |
| user code    | its return; else the pool ends the whole process group   |
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Generator
from types import ModuleType
from typing import IO, Any

import orjson

from areal.errors import ArealError
from areal.rewards.functions import RewardFunction, failure, raised, resolve, too_slow
from areal.v1 import reward_service_pb2 as pb
from areal_reward import frames
from areal_reward.frames import Kind
from areal_reward.progress import IDLE, LOADING, Progress

# Results wait this long at most before they are sent: what a kill can make be done again.
_FLUSH_S = 0.05
# What an asynchronous call has to end in once it is cancelled.
_CANCEL_S = 0.5
# Asynchronous calls at once in one worker.
_CONCURRENT = 64
_MAX_FUNCTIONS = 64
# Between the soft and the hard limit: what it takes to say that memory ran out.
_ROOM_BYTES = 16 << 20


class Worker:
    """State of the process: its recipe and functions, and what it has not sent yet."""

    def __init__(
        self, pipe: IO[bytes], progress: Progress, timeout_s: float, memory_bytes: int
    ) -> None:
        """Wires it up.

        Args:
            pipe: Where frames go.
            progress: Shared with the pool.
            timeout_s: For one asynchronous call; synchronous ones are ended by the pool.
            memory_bytes: Address space the process may grow by once its recipe is loaded.
        """
        self._pipe = pipe
        self._progress = progress
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        # A worker has one recipe at most.
        self._file_name, self._source = "", b""
        self._module: ModuleType | None = None
        self._functions: dict[bytes, RewardFunction] = {}
        self._positions: list[int] = []
        self._results: list[pb.ScoreResult] = []
        self._flushed = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runaway = False
        self._fence: int = resource.RLIM_INFINITY
        """The hard limit on address space; none until user code is about to run."""

    def serve(self, requests: IO[bytes]) -> None:
        """Answers until end of file, or until this process must be replaced."""
        self._limit_memory()
        self._send(Kind.READY, b"")
        while True:
            header = requests.read(frames.HEADER.size)
            if len(header) < frames.HEADER.size:
                return
            length, kind = frames.HEADER.unpack(header)
            body = requests.read(length)
            if kind == Kind.RECIPE:
                recipe = orjson.loads(body)
                self._file_name, self._source = recipe["file_name"], recipe["source"].encode()
                continue
            whole = self._score(pb.ScoreRequest.FromString(body))
            self._flush(Kind.DONE if whole else Kind.STOPPED)
            if not whole:
                return

    def _score(self, request: pb.ScoreRequest) -> bool:
        """Scores items; False: the process must be replaced (memory ran out, or a call runs on)."""
        self._flushed = time.monotonic()
        try:
            function = self._function(request.reward)
        except ArealError as error:
            for position in range(len(request.items)):
                self._add(position, failure(pb.SCORE_ERROR_INVALID, str(error)))
            return True
        if function.is_async:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(self._score_async(function, request))
        for position, item in enumerate(request.items):
            self._progress.set(position)
            result = self._call(function, item)
            self._progress.set(IDLE)
            if result is None:
                self._add(position, self._out_of_memory(function))
                return False
            self._add(position, result)
        return True

    def _call(self, function: RewardFunction, item: pb.ScoreItem) -> pb.ScoreResult | None:
        """Makes one synchronous call; returns None if memory ran out."""
        try:
            args, kwargs = function.bind(item)
            value = function.call(args, kwargs)
            if inspect.isawaitable(value):
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                value = self._loop.run_until_complete(_awaited(value))
            return function.result(value, item)
        except MemoryError:
            return None
        except BaseException as error:  # also SystemExit: user code must not end the worker so
            return raised(function.name, error, function.file)

    async def _score_async(self, function: RewardFunction, request: pb.ScoreRequest) -> bool:
        """Calls an asynchronous function on all items, some at a time."""
        places = asyncio.Semaphore(_CONCURRENT)
        whole = True

        async def one(position: int, item: pb.ScoreItem) -> None:
            nonlocal whole
            async with places:
                result = await self._call_async(function, position, item)
            if result is None:
                whole = False
                result = self._out_of_memory(function)
            self._add(position, result)

        async with asyncio.TaskGroup() as group:
            for position, item in enumerate(request.items):
                group.create_task(one(position, item))
        return whole and not self._runaway

    async def _call_async(
        self, function: RewardFunction, position: int, item: pb.ScoreItem
    ) -> pb.ScoreResult | None:
        """Makes one asynchronous call, ended at its deadline; returns None if memory ran out."""
        call = asyncio.ensure_future(self._finished(function, position, item))
        await asyncio.wait({call}, timeout=self._timeout_s)
        if call.done():
            return call.result()
        call.cancel()
        await asyncio.wait({call}, timeout=_CANCEL_S)
        # A call that will not be cancelled runs on in this process: another one takes its place.
        self._runaway = self._runaway or not call.done()
        return failure(pb.SCORE_ERROR_TIMEOUT, too_slow(function.name, self._timeout_s))

    async def _finished(
        self, function: RewardFunction, position: int, item: pb.ScoreItem
    ) -> pb.ScoreResult | None:
        try:
            args, kwargs = function.bind(item)
            value = await _Steps(function.call(args, kwargs), self._progress, position)
            return function.result(value, item)
        except MemoryError:
            return None
        except BaseException as error:  # also SystemExit: asyncio would end the loop with it
            return raised(function.name, error, function.file)

    def _function(self, reward: pb.RewardSpec) -> RewardFunction:
        """The function of a spec, loaded on first use; then memory is limited from there on."""
        key = reward.SerializeToString(deterministic=True)
        found = self._functions.get(key)
        if found is None:
            self._progress.set(LOADING)
            if not reward.recipe_digest:  # code of ours: the limit counts from what it loads
                self._set_limits(self._fence, self._fence)
            found = resolve(reward, self._loaded() if reward.recipe_digest else None)
            if len(self._functions) >= _MAX_FUNCTIONS:
                self._functions.clear()
            self._functions[key] = found
            gc.collect()
            gc.freeze()
            self._limit_memory()
            self._progress.set(IDLE)
        return found

    def _loaded(self) -> ModuleType:
        """The recipe, imported once; from then on memory has a limit that it cannot lift."""
        if self._module is None:
            from areal.recipe import load_recipe

            self._fence_memory(2 * self._memory_bytes)  # the import is user code already
            self._limit_memory()
            self._module = load_recipe(self._source, self._file_name)
            self._fence_memory(self._memory_bytes)
        return self._module

    def _limit_memory(self) -> None:
        """Limits what is added from here on; what user code must not undo is `_fence_memory`'s."""
        self._set_limits(self._address_space() + self._memory_bytes, self._fence)

    def _fence_memory(self, growth: int) -> None:
        """Lowers the hard limit, which only root can raise again, and never further up."""
        fence = self._address_space() + growth + _ROOM_BYTES
        self._fence = min(self._fence, fence) if self._fence >= 0 else fence

    @staticmethod
    def _address_space() -> int:
        if sys.platform != "linux":
            return 0
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib is not needed here
            pages = int(file.read().split()[0])
        return pages * resource.getpagesize()

    @staticmethod
    def _set_limits(soft: int, hard: int) -> None:
        if sys.platform != "linux":  # elsewhere the kernel does not enforce it
            return
        if hard >= 0:
            soft = min(soft, hard - _ROOM_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _out_of_memory(self, function: RewardFunction) -> pb.ScoreResult:
        resource.setrlimit(resource.RLIMIT_AS, (self._fence, self._fence))  # room to say so
        return failure(
            pb.SCORE_ERROR_CRASH,
            f"{function.name} ran out of memory: reward.memory_mb = {self._memory_bytes >> 20}",
        )

    def _add(self, position: int, result: pb.ScoreResult) -> None:
        self._positions.append(position)
        self._results.append(result)
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._flush(Kind.RESULTS)

    def _flush(self, kind: Kind) -> None:
        self._send(kind, frames.pack_results(self._positions, self._results))
        self._positions.clear()
        self._results.clear()
        self._flushed = time.monotonic()

    def _send(self, kind: Kind, body: bytes) -> None:
        self._pipe.write(frames.frame(kind, body))
        self._pipe.flush()


class _Steps:
    """An awaitable that notes each step of the one it wraps: a step that blocks has a name."""

    def __init__(self, inner: Any, progress: Progress, position: int) -> None:
        self._inner = inner
        self._progress = progress
        self._position = position

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._inner.__await__()
        advance: Callable[..., Any] = steps.__next__
        argument: tuple[Any, ...] = ()
        while True:
            self._progress.set(self._position)
            try:
                waiting_for = advance(*argument)
            except StopIteration as stop:
                return stop.value
            finally:
                self._progress.set(IDLE)
            try:
                sent = yield waiting_for
                advance, argument = steps.send, (sent,)
            except BaseException as error:  # a cancellation travels inwards
                advance, argument = steps.throw, (error,)


async def _awaited(value: Any) -> Any:
    return await value


def _die_with_parent(parent: int) -> None:
    """Ends this process when the service dies, even in the middle of an endless reward."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(argv: list[str]) -> None:
    """Runs `worker PARENT_PID PROGRESS_FD TIMEOUT_S MEMORY_MB`; frames on stdin and stdout."""
    parent, descriptor, timeout_s, memory_mb = int(argv[0]), int(argv[1]), argv[2], argv[3]
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The event loop leaves its own ends of our pipes open here. A child of user code that has them
    # would hide our end from the pool.
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    # dup() results are not inherited by children of user code.
    requests = os.fdopen(os.dup(0), "rb")
    pipe = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    progress = Progress(descriptor)
    os.close(descriptor)
    worker = Worker(pipe, progress, float(timeout_s), int(memory_mb) << 20)
    worker.serve(requests)


if __name__ == "__main__":
    main(sys.argv[1:])
    # Threads and exit handlers of user code must not keep the process.
    os._exit(0)
