"""Runs episodes: as many as there is room for, each to exactly one end.

                 room          lease                arun_episode                 report
    lease loop ───────> LEASED ───────> RUNNING ─┬─ trajectories ──> REPORTING ── CompleteTasks
        ^                                        ├─ None, equal rewards ────────── RejectTask
        │                                        ├─ raised ─────────────────────── ReturnTasks
        │                                        └─ stopped: lost lease ─────────> dropped
        └────────────── room again <─────────────────────── overdue, drain ─────── ReturnTasks

| who         | consumes       | waits for                    | unblocked by                       |
|-------------|----------------|------------------------------|------------------------------------|
| lease loop  | leases         | room, a server, a task       | an end; the table; lease_wait_s    |
| episode     | its lease      | agenerate, score             | their deadlines; episode_timeout_s |
| report      | the end        | the buffer                   | its answer; report_timeout_s       |
| keep_leases | running leases | a third of lease_ttl_s       | the timer                          |
| drain       | all of them    | partial tokens, then ends    | its deadline                       |

One task per episode and nothing per episode beside it: deadlines and renewals are checked for all
at once by `keep_leases`.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from areal.chassis import tracing
from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.chassis.waits import Wait
from areal.errors import ArealError, PromptDrift
from areal.protocol.leases import Lease, Return, ReturnCause
from areal.protocol.trajectories import GroupCodec
from areal.tokenizer import Tokenizer
from areal.types import LLMResponse, TrajectoryGroup
from areal_rollout.config import RolloutConfig
from areal_rollout.episode import EpisodeEngine
from areal_rollout.failures import describe_failure, leading_error, where_it_waits
from areal_rollout.interfaces import Buffer, Generation, Observer, Scorer, Workflows
from areal_rollout.journal import CallKey, decode
from areal_rollout.lease_trace import traced
from areal_rollout.results import RETRYABLE, End, Results, group_of, judge, note_times

_RENEW_CHUNK = 2000
# Whom the lease loop waits for, by the reason.
_WHO_STARVES = {
    "no_server": "weight-sync: no server takes traffic",
    "ledger": "buffer",
    "admission": "trainer",
    "queue": "a client that submits tasks",
}


class Stop(Enum):
    """Why an episode is cancelled."""

    LOST = "lost"
    OVERDUE = "overdue"
    DRAIN = "drain"


@dataclass(eq=False, slots=True)
class Episode:
    """The run of one leased task."""

    lease: Lease
    began: float
    task: asyncio.Task[None] | None = None
    engine: EpisodeEngine | None = None
    replayable: bool = False
    stop: Stop | None = None
    overdue: tuple[str, str] = ("", "")
    reporting: bool = False


class Executor:
    """Start `run` and `keep_leases` as background tasks; end with `drain`."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        buffer: Buffer,
        generation: Generation,
        scorer: Scorer,
        workflows: Workflows,
        tokenizer: Tokenizer,
        observer: Observer,
        session_group: Callable[[Lease], Awaitable[TrajectoryGroup | None]],
    ) -> None:
        """Takes what it calls; `session_group` builds the group of a session's ended attempts."""
        self._config = config
        self._buffer = buffer
        self._generation = generation
        self._scorer = scorer
        self._workflows = workflows
        self._tokenizer = tokenizer
        self._observer = observer
        self._session_group = session_group
        self._results = Results(buffer, config.worker_id, config.report_timeout_s)
        self._codec = GroupCodec()
        self._log = get_logger(__name__)
        self._episodes: dict[str, Episode] = {}
        self._room = asyncio.Event()
        self._draining = False
        self._run_ended = asyncio.Event()
        self._run_ended.set()
        self._settled = asyncio.Event()
        self._busy_since = self._busy_s = 0.0
        self._starved: tuple[str, float] | None = None

    @property
    def running(self) -> int:
        """Number of episodes running now."""
        return len(self._episodes)

    def oldest_s(self) -> float:
        """The age of the oldest running episode."""
        began = min((e.began for e in self._episodes.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def waits(self) -> Iterator[Wait]:
        """Yields the oldest episode, and since when no task came, for the watchdog."""
        now = time.monotonic()
        if self._episodes:
            episode = min(self._episodes.values(), key=lambda each: each.began)
            at = "its end" if episode.reporting else ""
            if not at and episode.task is not None:
                at = where_it_waits(episode.task)[0]
            whom = "buffer" if episode.reporting else "its workflow"
            detail = f"{episode.lease.task.task_id}, {at}"
            yield Wait("episode", whom, now - episode.began, detail)
        if self._starved is not None:
            reason, since = self._starved
            yield Wait("task", _WHO_STARVES[reason], now - since, reason)

    # ------------------------------------------------------------ leasing

    async def run(self) -> None:
        """Leases and starts episodes until drained."""
        config = self._config
        backoff = Backoff()
        self._run_ended.clear()
        try:
            while not self._draining:
                room = config.capacity - len(self._episodes)
                if room <= 0:
                    self._room.clear()
                    await self._room.wait()
                    continue
                since = time.monotonic()
                if not await self._generation.wait_ready(config.lease_wait_s):
                    self._waited("no_server", since)
                    continue
                try:
                    leases, reason = await self._buffer.lease_tasks(
                        config.worker_id,
                        min(room, config.max_leases),
                        config.lease_wait_s,
                        boot=config.boot,
                    )
                except RETRYABLE as error:
                    if backoff.fresh:
                        self._log.warning("lease_failed", error=str(error))
                    self._room.clear()
                    await _either(self._room, backoff.next())
                    self._waited("ledger", since)
                    continue
                backoff.reset()
                if leases:
                    self._starved = None
                for lease in leases:
                    self._begin(lease)
                if not leases:
                    kind = "admission" if reason.startswith("admission") else "queue"
                    self._waited(kind, since)
        finally:
            self._run_ended.set()

    def _waited(self, reason: str, since: float) -> None:
        """Records since when no task could be leased; the first time counts for the watchdog."""
        self._observer.waited(reason, time.monotonic() - since)
        if self._starved is None or self._starved[0] != reason:
            self._starved = (reason, since)

    def _begin(self, lease: Lease) -> None:
        now = time.monotonic()
        task_id = lease.task.task_id
        before = self._episodes.get(task_id)
        if before is not None:  # its lease expired, and this worker got the task again
            self._stop(before, Stop.LOST)
        if not self._episodes:
            self._busy_since = now
        episode = Episode(lease, now)
        self._episodes[task_id] = episode
        episode.task = asyncio.create_task(
            traced(lease, self._config.worker_id, self._live, episode)
        )

    async def keep_leases(self) -> None:
        """Renews all leases, stops lost and overdue episodes; forever."""
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / 3)
            self.busy_s()
            self._stop_overdue()
            held = list(self._episodes.items())
            # All at once: one after the other, a slow buffer would let the last ones expire.
            await asyncio.gather(
                *(
                    self._renew(held[start : start + _RENEW_CHUNK])
                    for start in range(0, len(held), _RENEW_CHUNK)
                )
            )

    async def _renew(self, held: list[tuple[str, Episode]]) -> None:
        leases = [(task_id, episode.lease.token) for task_id, episode in held]
        try:
            lost = await self._buffer.renew_leases(self._config.worker_id, leases)
        except ArealError as error:
            # The buffer extends leases after its own outage: continue.
            self._log.warning("renew_failed", leases=len(held), error=str(error))
            return
        for task_id, episode in held:
            # A late completion may still count: let it be reported.
            if task_id in lost and not episode.reporting:
                self._log.info("lease_lost", task_id=task_id)
                self._stop(episode, Stop.LOST)

    def _stop_overdue(self) -> None:
        limit = self._config.episode_timeout_s
        now = time.monotonic()
        for episode in self._episodes.values():
            if now - episode.began <= limit or episode.reporting or episode.task is None:
                continue
            if episode.stop is Stop.OVERDUE:  # it swallowed the cancellation
                episode.task.cancel()
                continue
            line, stack = where_it_waits(episode.task)
            name = episode.lease.task.workflow.name
            episode.overdue = (
                f"episode of workflow {name!r} ran longer than {limit:g} s (4 x "
                f"rollout.request_timeout_s); it was waiting at {line}",
                stack,
            )
            self._stop(episode, Stop.OVERDUE)

    def _stop(self, episode: Episode, why: Stop) -> None:
        if episode.stop is None and not episode.reporting and episode.task is not None:
            episode.stop = why
            episode.task.cancel()

    # ------------------------------------------------------------ one episode

    async def _live(self, episode: Episode) -> None:
        """Runs an episode from its lease to its end; never raises."""
        outcome = "lost"
        try:
            try:
                end = await self._run_workflow(episode)
            except asyncio.CancelledError:
                if episode.stop in {None, Stop.LOST}:
                    return
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                end = await self._stopped(episode)
            episode.reporting = True
            if episode.engine is not None:
                episode.engine.close()
            outcome = await self._results.report(episode.lease, end)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            task_id = episode.lease.task.task_id
            self._log.error("episode_failed", task_id=task_id, exc_info=error)
        finally:
            if episode.engine is not None:
                episode.engine.close()
            if self._episodes.get(episode.lease.task.task_id) is episode:
                del self._episodes[episode.lease.task.task_id]
            if not self._episodes:
                self._account_busy()
            self._room.set()
            self._observer.episode_ended(outcome)
            tracing.note({"areal.outcome": outcome})

    async def _run_workflow(self, episode: Episode) -> End:
        lease = episode.lease
        try:
            group = await (self._session_group(lease) if lease.attempts else self._play(episode))
            if self._draining and episode.engine is not None and episode.engine.interrupted:
                # It took an interruption for an answer: the rerun gives it the real one.
                return await self._stopped(episode)
            if group is not None and not lease.attempts:  # sessions count their own
                self._observer.conversations_split(group.trajectories)
            return judge(
                group,
                lease,
                dynamic_sampling=self._config.dynamic_sampling,
                reject_single=self._config.reject_single,
            )
        except asyncio.CancelledError:
            if episode.stop is None and not self._draining:
                return Return(
                    ReturnCause.WORKFLOW_ERROR,
                    "arun_episode cancelled itself",
                    traceback.format_exc()[-8000:],
                )
            raise
        except (Exception, SystemExit) as error:
            if self._draining and (episode.engine is None or episode.engine.interrupted):
                return await self._stopped(episode)
            if isinstance(leading_error(error), PromptDrift):
                self._observer.drifted()
            end = describe_failure(error)
            if end.cause is ReturnCause.WORKFLOW_ERROR:
                return end
            return replace(end, partial=lambda: self._journal(episode))

    async def _play(self, episode: Episode) -> TrajectoryGroup | None:
        lease = episode.lease
        workflow = await self._workflows.get(lease.task.workflow)
        episode.replayable = workflow.replayable
        replay = None
        if lease.partial and workflow.replayable:
            replay = self._replay(lease)
        episode.engine = EpisodeEngine(
            self._generation,
            self._scorer,
            self._tokenizer,
            group=lease.task.task_id,
            min_version=max(lease.policy_version, lease.task.policy_version or 0),
            avoid=lease.failed_servers,
            replay=replay,
        )
        result = await workflow.arun_episode(episode.engine, lease.task.data)
        group = group_of(result, lease, workflow.arun_episode)
        if group is not None:
            ran_s = time.monotonic() - episode.began
            note_times(group, lease, ran_s, episode.engine.score_s)
        return group

    async def _stopped(self, episode: Episode) -> Return:
        """The ending of an episode that was cut short."""
        if episode.stop is Stop.OVERDUE:
            return Return(ReturnCause.WORKFLOW_ERROR, *episode.overdue)
        if episode.stop is None:
            # For drain, which has a deadline and cancels one call after another.
            await self._settled.wait()
        return Return(
            ReturnCause.DRAIN, "the worker is draining", partial=lambda: self._journal(episode)
        )

    def _replay(self, lease: Lease) -> dict[CallKey, LLMResponse] | None:
        try:
            calls = decode(lease.partial, self._config.journal_max_bytes, self._codec)
        except ValueError as error:
            self._log.warning("journal_dropped", task_id=lease.task.task_id, error=str(error))
            return None
        self._observer.replayed(sum(len(call.output_tokens) for call in calls.values()))
        return calls

    def _journal(self, episode: Episode) -> bytes:
        if episode.engine is None:
            return episode.lease.partial
        if not episode.replayable:
            return b""
        return episode.engine.journal(self._config.journal_max_bytes, self._codec)

    # ------------------------------------------------------------ leaving

    async def drain(self, timeout: float) -> None:
        """Returns every lease with its partial work; at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._draining = True
        self._room.set()
        await asyncio.gather(
            self._generation.interrupt(0.4 * timeout),
            # A lease call that is under way may still bring tasks: they are returned at once.
            _either(self._run_ended, self._config.lease_wait_s + 1.0),
        )
        # Leases are returned in the order in which their episodes are stopped: what is lost if
        # the time does not suffice is what cost the least.
        held = sorted(self._episodes.values(), key=_tokens, reverse=True)
        for episode in held:
            self._stop(episode, Stop.DRAIN)
        self._settled.set()
        tasks = [e.task for e in self._episodes.values() if e.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=max(0.1, deadline - time.monotonic()))
            for task in late:
                task.cancel()
            if late:
                self._log.warning("drain_left_leases", leases=len(late))

    def busy_s(self) -> float:
        """Returns the seconds so far in which an episode was running; updates the count."""
        if self._episodes:
            self._account_busy()
        return self._busy_s

    def _account_busy(self) -> None:
        now = time.monotonic()
        self._observer.busy(now - self._busy_since)
        self._busy_s += now - self._busy_since
        self._busy_since = now


def _tokens(episode: Episode) -> int:
    return 0 if episode.engine is None else episode.engine.generated_tokens


async def _either(event: asyncio.Event, timeout: float) -> None:
    """Waits for an event or for so long."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        pass
