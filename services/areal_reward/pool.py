"""The pool: a bounded queue of jobs before a fixed number of worker processes.

    score(items) ──split──> queue ──> slot 0 ──frames──> worker process
                              |                             |
                              └─────> slot 1 …              | hangs, dies, runs out of memory
                                        ^                   v
                                        └── a fresh worker continues with the job's other items

A slot keeps one worker alive at all times (prewarmed) and works on one job at a time. A job is a
slice of one call. When its worker ends early, results already received stay, the item that was
running gets a failure, and the rest goes to the next worker: one bad item costs only itself.

| who       | consumes           | waits for                       | unblocked by                 |
|-----------|--------------------|---------------------------------|------------------------------|
| score()   | room in the queue  | its jobs                        | slots; refused when full     |
| slot      | jobs               | a job; then its worker's frames | score(); results; the item's |
|           |                    |                                 | deadline; end of the process |
| drain()   | -                  | accepted jobs                   | slots; the grace period      |
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal.chassis.logging import get_logger
from areal.errors import Unavailable
from areal.rewards import CHECKERS
from areal.rewards.functions import failure, too_slow
from areal.types import TIMEOUTS
from areal.v1 import reward_service_pb2 as pb
from areal_reward.config import RewardConfig
from areal_reward.frames import Kind, unpack_results
from areal_reward.metrics import RewardMetrics
from areal_reward.progress import LOADING, Progress

# A call is split over the workers, but not into slices smaller than this.
_MIN_SLICE = 4
# A worker that neither runs an item nor says anything (between frames) is given this much more.
_SILENCE_MARGIN_S = 30.0
# After a kill, the pipe's rest is read for at most this long.
_LAST_WORDS_S = 5.0
_MAX_UNEXPLAINED = 2


class Worker(Protocol):
    """What the pool needs of a worker process (see process.py)."""

    progress: Progress

    def accepts(self, digest: str) -> bool: ...
    async def send(self, request: bytes, digest: str, recipe: tuple[str, bytes] | None) -> None: ...
    async def read(self) -> tuple[Kind, bytes] | None: ...
    def kill(self) -> None: ...
    async def end(self) -> str: ...


@dataclass
class _Job:
    """A slice of one call."""

    reward: pb.RewardSpec
    recipe: tuple[str, bytes] | None
    items: list[pb.ScoreItem]
    done: asyncio.Future[None]
    results: list[pb.ScoreResult | None] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    unexplained: int = 0
    """Workers lost while no item was running."""


class WorkerPool:
    """Scores batches in worker processes."""

    def __init__(
        self,
        config: RewardConfig,
        start_worker: Callable[[], Awaitable[Worker]],
        metrics: RewardMetrics,
    ) -> None:
        """Wires it up; `run_slot` does the work, once per worker, as a background task."""
        self._config = config
        self._start_worker = start_worker
        self._metrics = metrics
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._waiting_items = 0
        self._ready = 0
        self._all_ready = asyncio.Event()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = get_logger(__name__)

    async def score(
        self,
        reward: pb.RewardSpec,
        items: list[pb.ScoreItem],
        recipe: tuple[str, bytes] | None,
    ) -> list[pb.ScoreResult]:
        """Scores a batch; one result per item, in order.

        Args:
            reward: The function.
            items: Items to score.
            recipe: (file name, source) behind `reward.recipe_digest`; None for a built-in.

        Raises:
            Unavailable: The queue is full, or the service is draining.
        """
        if self._draining:
            raise Unavailable("reward: this service is shutting down")
        limit = self._config.max_waiting_items
        # A call larger than the whole queue is let in when it is alone.
        if self._waiting_items and self._waiting_items + len(items) > limit:
            raise Unavailable(
                f"reward: {self._waiting_items} items are waiting; {len(items)} more would exceed "
                f"the limit of {limit}"
            )
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        size = max(_MIN_SLICE, math.ceil(len(items) / self._config.workers))
        jobs = []
        for start in range(0, len(items), size):
            part = items[start : start + size]
            job = _Job(reward, recipe, part, loop.create_future())
            job.results = [None] * len(part)
            job.pending = list(range(len(part)))
            jobs.append(job)
            self._queue.put_nowait(job)
        self._count_waiting(len(items))
        try:
            await asyncio.gather(*(job.done for job in jobs))
        finally:
            # Cancelled: the futures are too, and slots drop these jobs.
            self._count_waiting(-len(items))
        self._metrics.batch_seconds.observe(time.perf_counter() - began)
        results = [result for job in jobs for result in job.results if result is not None]
        self._count_outcomes(results)
        return results

    async def wait_ready(self) -> None:
        """Returns when every slot has a worker; starting one is bounded by `load_timeout_s`."""
        await self._all_ready.wait()

    async def drain(self) -> None:
        """Refuses new calls and waits for those accepted."""
        self._draining = True
        await self._idle.wait()

    async def run_slot(self) -> None:
        """Keeps one worker running; never returns, raises when no worker can be started."""
        worker: Worker | None = None
        counted = False
        try:
            while True:
                if worker is None:
                    worker = await self._start_worker()
                    if not counted:
                        counted = True
                        self._ready += 1
                        if self._ready == self._config.workers:
                            self._all_ready.set()
                job = await self._queue.get()
                if not worker.accepts(job.reward.recipe_digest) and not job.done.done():
                    self._metrics.workers_ended.labels("recipe").inc()
                    ended, worker = worker, None
                    await ended.end()
                while job.pending and not job.done.done():
                    worker = worker or await self._start_worker()
                    cause = await self._attempt(worker, job)
                    if cause:
                        self._metrics.workers_ended.labels(cause).inc()
                        ended, worker = worker, None
                        await ended.end()
                if not job.done.done():
                    job.done.set_result(None)
        finally:
            if worker is not None:
                worker.kill()

    async def _attempt(self, worker: Worker, job: _Job) -> str:
        """Tries what is pending on one worker; returns why the worker must go, or ""."""
        sent = list(job.pending)
        request = pb.ScoreRequest(reward=job.reward, items=[job.items[i] for i in sent])
        sending = asyncio.ensure_future(
            worker.send(request.SerializeToString(), job.reward.recipe_digest, job.recipe)
        )
        reading = asyncio.ensure_future(worker.read())
        events: set[asyncio.Future[Any]]
        heard = time.monotonic()
        overdue: int | None = None
        try:
            while True:
                # An item may begin at any moment: look again within one item's time.
                limit = min(self._time_left(worker, heard), self._config.timeout_s)
                if overdue is not None:
                    limit = _LAST_WORDS_S
                events = {reading, job.done}
                await asyncio.wait(events, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if job.done.done():
                    return "abandoned"
                if not reading.done():
                    if overdue is not None:
                        break
                    if self._time_left(worker, heard) <= 0:
                        overdue = worker.progress.get()[0]
                        worker.kill()
                    continue
                frame = reading.result()
                if frame is None or not self._record(job, sent, frame[1]):
                    break
                heard = time.monotonic()
                if frame[0] is Kind.STOPPED:
                    return "memory or runaway"
                if frame[0] is Kind.DONE and not job.pending and overdue is None:
                    return ""
                reading = asyncio.ensure_future(worker.read())
        finally:
            reading.cancel()
            sending.cancel()
        return await self._blame(worker, job, sent, overdue)

    def _time_left(self, worker: Worker, heard: float) -> float:
        """Returns the seconds until the worker is overdue: its item, its loading, its silence."""
        position, since = worker.progress.get()
        now = time.monotonic()
        longest = self._config.load_timeout_s + self._config.timeout_s + _SILENCE_MARGIN_S
        # A function that keeps renewing the time it shares with us still has to answer.
        return min(self._time_left_as_told(position, since, heard, now), heard + longest - now)

    def _time_left_as_told(self, position: int, since: float, heard: float, now: float) -> float:
        if since > now:
            return 0.0  # the clock is shared: only a function that tampers gets there
        if position >= 0:
            return since + self._config.timeout_s - now
        if position == LOADING:
            return since + self._config.load_timeout_s - now
        return max(heard, since) + self._config.timeout_s + _SILENCE_MARGIN_S - now

    @staticmethod
    def _record(job: _Job, sent: list[int], body: bytes) -> bool:
        """Stores a frame's results; False: it is not what a worker sends."""
        try:
            positions, results = unpack_results(body)
        except ValueError:
            return False
        for position, result in zip(positions, results, strict=True):
            if position >= len(sent) or not result.WhichOneof("outcome"):
                return False
            job.results[sent[position]] = result
        job.pending = [i for i in job.pending if job.results[i] is None]
        return True

    async def _blame(self, worker: Worker, job: _Job, sent: list[int], overdue: int | None) -> str:
        """The worker has ended early: gives the running item its failure."""
        position = worker.progress.get()[0] if overdue is None else overdue
        how = await worker.end()
        name = job.reward.name
        guilty = sent[position] if 0 <= position < len(sent) else -1
        timed_out = overdue is not None
        self._log.warning(
            "worker_ended", reward=name, cause="timeout" if timed_out else how, position=position
        )
        if guilty in job.pending:
            if timed_out and not job.reward.recipe_digest and name in CHECKERS:
                # Its time depends on the model's text alone, so that text is what is wrong.
                result = pb.ScoreResult(reward=0.0, parts={TIMEOUTS: 1.0})
            elif timed_out:
                text = too_slow(name, self._config.timeout_s)
                result = failure(pb.SCORE_ERROR_TIMEOUT, f"{text}; its worker was killed")
            else:
                result = failure(
                    pb.SCORE_ERROR_CRASH, f"{name}: the worker died while scoring ({how})"
                )
            job.results[guilty] = result
            job.pending.remove(guilty)
        elif position == LOADING and timed_out:
            wait = self._config.load_timeout_s
            text = f"{name}: loading its recipe took longer than {wait:g} s"
            self._fail_pending(job, pb.SCORE_ERROR_TIMEOUT, text)
        else:
            job.unexplained += 1
            if job.unexplained >= _MAX_UNEXPLAINED:
                doing = "loading its recipe" if position == LOADING else "between items"
                text = f"{name}: the worker died {doing}, {job.unexplained} times ({how})"
                self._fail_pending(job, pb.SCORE_ERROR_CRASH, text)
        return "timeout" if timed_out else "crash"

    @staticmethod
    def _fail_pending(job: _Job, error: pb.ScoreError.ValueType, message: str) -> None:
        for index in job.pending:
            job.results[index] = failure(error, message)
        job.pending = []

    def _count_waiting(self, change: int) -> None:
        self._waiting_items += change
        self._metrics.waiting.set(self._waiting_items)
        if self._waiting_items:
            self._idle.clear()
        else:
            self._idle.set()

    def _count_outcomes(self, results: list[pb.ScoreResult]) -> None:
        failures = 0
        for result in results:
            if result.WhichOneof("outcome") == "failure":
                failures += 1
                label = pb.ScoreError.Name(result.failure.error).removeprefix("SCORE_ERROR_")
                self._metrics.items.labels(label.lower()).inc()
        self._metrics.items.labels("reward").inc(len(results) - failures)
