"""The ledger's transitions, each one atomic Lua script in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar, cast

import redis.asyncio as redis
from redis.exceptions import RedisError

from areal import errors
from areal.chassis.waits import Waits
from areal.clients.stores import redis_prefix
from areal.types import Purpose, TaskState
from areal_buffer.config import BufferConfig
from areal_buffer.records import (
    RECORD_FIELDS,
    FinishedGroup,
    NewTask,
    ReturnedLease,
    Stats,
    StoredLease,
    StoredTask,
    Swept,
    Take,
    TakenGroup,
    Trainer,
    failures_of,
    stored_task,
    text,
)
from areal_buffer.scripts import Scripts, translate

# Work of one script call: bounds how long Redis is busy with it.
_CHUNK_TASKS = 500
_CHUNK_BYTES = 8 * 1024 * 1024
_CHUNK_READ_GROUPS = 16
_FETCH_BYTES = 1024 * 1024
# Payloads that pass through Lua, which copies them: little, to save a small batch a call of Redis.
_ALONG_BYTES = 256 * 1024
T = TypeVar("T")


def _chunks(items: Sequence[T], size_of: Callable[[T], int]) -> Iterable[Sequence[T]]:
    """At least one chunk, each bounded in number and bytes."""
    start, size = 0, 0
    for at, item in enumerate(items):
        size += size_of(item)
        if at > start and (at - start >= _CHUNK_TASKS or size > _CHUNK_BYTES):
            yield items[start:at]
            start, size = at, size_of(item)
    yield items[start:]


def _taken_group(entry: bytes) -> TakenGroup:
    # A batch taken before the time was kept has no fourth part.
    task_id, head, lengths, *since = entry.decode().split("\n")
    sizes = tuple(int(n) for n in lengths.split(",") if n)
    return TakenGroup(task_id, int(head), sizes, int(since[0]) if since else 0)


class RedisStore:
    """Every method is atomic (submit: per 500 tasks) and raises what the script refused with.

    Raises, all methods: Unavailable while Redis is away, CapacityExceeded when it is out of memory.
    """

    def __init__(self, client: redis.Redis, config: BufferConfig, waits: Waits) -> None:
        self._redis = client
        self._prefix = redis_prefix(config.namespace)
        self._scripts = Scripts(client, config, self._prefix, waits)
        self.wake_channel = self._prefix + "wake"

    # -- tasks --------------------------------------------------------------------------------

    async def submit(
        self, tasks: Sequence[NewTask], *, incarnation: int, seal: bool, limit: int
    ) -> list[bool]:
        """Queues tasks; one flag each, False: known before.

        Raises:
            CapacityExceeded: There is no room for one of them, and those before it are queued.
        """
        accepted: list[bool] = []
        for chunk in _chunks(tasks, lambda task: len(task.body)):
            args: list[str | int | bytes] = []
            for task in chunk:
                epoch, index = task.position or ("", "")
                ttl = "" if task.time_to_live_ms is None else task.time_to_live_ms
                args += [task.task_id, task.purpose.value, task.body, epoch, index, ttl]
            last = len(accepted) + len(chunk) == len(tasks)
            flags = await self._scripts.run("submit", incarnation, int(seal and last), limit, *args)
            accepted += [flag == 1 for flag in flags]
        return accepted

    async def cancel(
        self, task_ids: Sequence[str], purpose: Purpose | None, *, reason: str, incarnation: int
    ) -> int:
        """Cancels named tasks, or all of a purpose; returns how many."""
        if purpose is not None:
            total = 0
            while done := await self._scripts.run("cancel", incarnation, reason, purpose.value):
                total += int(done)
            return total
        total = 0
        for start in range(0, len(task_ids), _CHUNK_TASKS):
            chunk = task_ids[start : start + _CHUNK_TASKS]
            total += int(await self._scripts.run("cancel", incarnation, reason, "", *chunk))
        return total

    async def read(self, task_ids: Sequence[str], *, groups: bool) -> AsyncIterator[StoredTask]:
        """Records in the order asked; unknown ids are left out."""
        size = _CHUNK_READ_GROUPS if groups else _CHUNK_TASKS
        for start in range(0, len(task_ids), size):
            chunk = task_ids[start : start + size]
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    for task_id in chunk:
                        pipe.hmget(f"{self._prefix}task:{task_id}", list(RECORD_FIELDS))
                    if groups:
                        pipe.mget([f"{self._prefix}group:{task_id}" for task_id in chunk])
                    rows = await pipe.execute()
            except RedisError as error:
                raise translate(error) from None
            payloads = rows[-1] if groups else [None] * len(chunk)
            for task_id, row, payload in zip(chunk, rows, payloads, strict=False):
                values = dict(zip(RECORD_FIELDS, row, strict=True))
                if values["state"] is not None:
                    yield stored_task(task_id, values, payload)

    async def mark_read(self, task_ids: Sequence[str]) -> None:
        """Results of these have been read: they are released some minutes later, or for room."""
        for start in range(0, len(task_ids), _CHUNK_TASKS):
            await self._scripts.run("read", *task_ids[start : start + _CHUNK_TASKS])

    async def ended(self, task_ids: Sequence[str], incarnation: int = 0) -> list[str]:
        """Those that have ended or are completed; an empty answer flags the wait.

        Raises:
            WorkflowError: The run of the waiting trainer (0: someone else) has been stopped.
        """
        found = await self._scripts.run("ended", incarnation, *task_ids)
        return [text(task_id) for task_id in found]

    # -- leases -------------------------------------------------------------------------------

    async def lease(
        self, worker_id: str, max_tasks: int, boot: int = 0
    ) -> tuple[list[StoredLease], str]:
        """Leases what admission allows now; the reason when that is nothing."""
        reason, rows = await self._scripts.run("lease", worker_id, max_tasks, boot)
        leases = [
            StoredLease(
                text(task_id),
                body,
                int(token),
                int(version),
                partial,
                tuple(text(failed).split("\n")) if failed else (),
                int(since),
            )
            for task_id, body, token, version, partial, failed, since in rows
        ]
        return leases, text(reason)

    async def renew(self, worker_id: str, leases: Sequence[tuple[str, int]]) -> list[str]:
        """Extends leases; returns the ids that are lost."""
        lost: list[str] = []
        for start in range(0, len(leases), _CHUNK_TASKS):
            pairs = [part for lease in leases[start : start + _CHUNK_TASKS] for part in lease]
            lost += [
                text(task_id) for task_id in await self._scripts.run("renew", worker_id, *pairs)
            ]
        return lost

    async def complete(
        self, groups: Sequence[FinishedGroup], *, limit: int
    ) -> list[bool | errors.ArealError]:
        """Records groups, each by itself; one script for many.

        Args:
            groups: Validated ones.
            limit: Bytes that the ledger may hold.

        Returns:
            For each: True; False: it had been recorded before; or why it was refused.
        """
        results: list[bool | errors.ArealError] = []
        for chunk in _chunks(groups, lambda group: len(group.payload)):
            args: list[str | int | bytes] = [limit]
            for group in chunk:
                args += [
                    group.task_id,
                    group.token,
                    group.head_version,
                    ",".join(map(str, group.lengths)),
                    len(group.lengths),
                    group.generated_tokens,
                    len(group.payload),
                ]
            payloads = [group.payload for group in chunk]
            for reply in await self._scripts.run_with("complete", payloads, *args):
                result = translate(reply) if isinstance(reply, RedisError) else reply == 1
                if isinstance(result, errors.Unavailable):
                    raise result  # of all: they are tried again together
                results.append(result)
        return results

    async def reject(self, task_id: str, token: int, reason: str) -> None:
        """Ends a task by its workflow's choice."""
        await self._scripts.run("reject", task_id, token, reason)

    async def give_back(
        self, leases: Sequence[ReturnedLease], *, limit: int
    ) -> list[TaskState | errors.ArealError]:
        """Gives leases back, each by itself; for each its task's state, or why it was refused.

        Journals that pass the `limit`, in bytes, are dropped.
        """
        results: list[TaskState | errors.ArealError] = []
        if not leases:
            return results
        for chunk in _chunks(leases, lambda lease: len(lease.partial) + len(lease.traceback)):
            args: list[str | int | bytes] = [limit]
            for each in chunk:
                args += [each.task_id, each.token, each.cause, each.detail, each.traceback]
                args += [each.partial, each.failed_server, each.site]
            for reply in await self._scripts.run("return", *args):
                if isinstance(reply, RedisError):
                    results.append(translate(reply))
                else:
                    results.append(TaskState(text(reply)))
        return results

    async def sweep(self) -> Swept:
        """One bounded sweep of leases and deadlines."""
        return Swept(*(int(value) for value in await self._scripts.run("sweep")))

    # -- training -----------------------------------------------------------------------------

    async def register_trainer(
        self,
        resume_step: int,
        batch_size: int,
        eta: int,
        max_concurrent: int,
        recipe_digest: str = "",
    ) -> Trainer:
        """A new incarnation."""
        args = (resume_step, batch_size, eta, max_concurrent, recipe_digest)
        reply = await self._scripts.run("register", *args)
        return Trainer(*(int(value) for value in reply))

    async def take(
        self,
        incarnation: int,
        step: int,
        task_ids: Sequence[str],
        *,
        limit: int,
        with_groups: bool = False,
        refill_below: int = 0,
    ) -> Take:
        """One attempt at the batch of a step; `waiting` flags the wait.

        `limit`: bytes that the ledger may hold; near it, a commit is asked for where that helps.
        `with_groups` brings along the payloads of the first groups, as many as are small.
        """
        along = _ALONG_BYTES if with_groups else 0
        reply = await self._scripts.run(
            "take", incarnation, step, limit, along, refill_below, *task_ids
        )
        state, why, replay, queued, running, completed, wanted, payloads, entries = reply
        return Take(
            state=text(state),
            waiting_for=text(why),
            replay=replay == 1,
            queued=queued,
            running=running,
            completed=completed,
            rows_wanted=wanted == 1,
            groups=tuple(_taken_group(entry) for entry in entries),
            payloads=payloads,
        )

    async def fetch(
        self, incarnation: int, step: int, task_ids: Sequence[str]
    ) -> AsyncIterator[list[bytes]]:
        """Payloads of a step's groups as they were handed in, in the order asked, some at once."""
        at = 0
        while at < len(task_ids):
            ids = task_ids[at : at + _CHUNK_TASKS]
            together = await self._scripts.run("fetch", incarnation, step, _FETCH_BYTES, *ids)
            yield await self.payloads(step, ids[:together])
            at += together

    async def payloads(self, step: int, task_ids: Sequence[str]) -> list[bytes]:
        """Payloads of groups that a script has just found to be of this step."""
        try:
            found = await self._redis.mget([f"{self._prefix}group:{each}" for each in task_ids])
        except RedisError as error:
            raise translate(error) from None
        for task_id, payload in zip(task_ids, found, strict=True):
            if payload is None:
                raise errors.NotFound(f"task {task_id}: its group of step {step} was released")
        return cast("list[bytes]", found)

    async def commit(self, incarnation: int, step: int, oldest_retained_step: int) -> int:
        """Ends steps as trained, releases payloads; returns the last committed step."""
        return int(await self._scripts.run("commit", incarnation, step, oldest_retained_step))

    # -- looking ------------------------------------------------------------------------------

    async def dead_letters(self, limit: int) -> AsyncIterator[StoredTask]:
        """Newest first."""
        try:
            ids = await self._redis.zrevrange(f"{self._prefix}dead", 0, limit - 1)
        except RedisError as error:
            raise translate(error) from None
        async for task in self.read([text(task_id) for task_id in ids], groups=False):
            yield task

    async def retry_dead_letters(self, task_ids: Sequence[str]) -> int:
        """Queues dead letters (empty: all) again; returns how many."""
        return await self._with_dead_letters("retry", task_ids)

    async def drop_dead_letters(self, task_ids: Sequence[str]) -> int:
        """Takes dead letters (empty: all) off the list for good; returns how many."""
        return await self._with_dead_letters("drop", task_ids)

    async def _with_dead_letters(self, script: str, task_ids: Sequence[str]) -> int:
        total = 0
        if task_ids:
            for start in range(0, len(task_ids), _CHUNK_TASKS):
                total += int(
                    await self._scripts.run(script, *task_ids[start : start + _CHUNK_TASKS])
                )
            return total
        while done := int(await self._scripts.run(script)):
            total += done
        return total

    async def stats(self) -> Stats:
        """Counters and gauges."""
        reply = await self._scripts.run("stats")
        meta, counts, headroom, oldest, batch_size, eta, concurrent, first, attempts = reply
        numbers: dict[str, int] = {}
        stopped = ""
        for key, value in zip(meta[::2], meta[1::2], strict=True):
            if value.lstrip(b"-").isdigit():
                numbers[key.decode()] = int(value)
            if key == b"stopped":
                stopped = text(value)
        tallies = {
            key.decode(): int(value) for key, value in zip(counts[::2], counts[1::2], strict=True)
        }
        taken = numbers.get("staleness_count", 0)
        return Stats(
            submitted=numbers.get("submitted", 0),
            counts={state: tallies.get(f"all:{state}", 0) for state in TaskState},
            train_counts={state: tallies.get(f"train:{state}", 0) for state in TaskState},
            policy_version=numbers.get("policy_version", 0),
            incarnation=numbers.get("incarnation", 0),
            last_taken_step=numbers.get("last_taken", 0),
            last_committed_step=numbers.get("last_committed", 0),
            batch_size=int(batch_size),
            max_head_offpolicyness=int(eta),
            max_concurrent_rollouts=int(concurrent),
            admission_headroom=int(headroom),
            staleness_mean=numbers.get("staleness_sum", 0) / taken if taken else 0.0,
            staleness_max=numbers.get("staleness_max", 0),
            regenerated=numbers.get("regenerated", 0),
            oldest_queued_ms=int(oldest),
            trajectories=numbers.get("trajectories", 0),
            generated_tokens=numbers.get("generated_tokens", 0),
            failures=failures_of(first, attempts),
            stopped=stopped,
            retried=numbers.get("retried", 0),
            held_bytes=numbers.get("bytes:train", 0) + numbers.get("bytes:serve", 0),
        )

    async def memory(self) -> tuple[int, int]:
        """Bytes that Redis uses, all its runs together, and its own limit (0: none).

        Raises:
            ConfigError: At that limit it would throw tasks away.
        """
        try:
            info = await self._redis.info("memory")
        except RedisError as error:
            raise translate(error) from None
        limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", ""))
        if limit and policy.startswith("allkeys"):
            raise errors.ConfigError(
                f"endpoints.redis: its maxmemory-policy {policy!r} throws tasks away when it is "
                "full, expected noeviction"
            )
        return int(info["used_memory"]), limit

    # -- recipes ------------------------------------------------------------------------------

    async def put_recipe(self, digest: str, file_name: str, source: bytes) -> None:
        """Stores a recipe's source."""
        try:
            await self._redis.hset(
                f"{self._prefix}recipe:{digest}",
                mapping={"file_name": file_name, "source": source},
            )
        except RedisError as error:
            raise translate(error) from None

    async def get_recipe(self, digest: str) -> tuple[str, bytes] | None:
        """(file name, source), or None."""
        try:
            name, source = await self._redis.hmget(
                f"{self._prefix}recipe:{digest}", ["file_name", "source"]
            )
        except RedisError as error:
            raise translate(error) from None
        return None if source is None else (text(name), cast("bytes", source))
