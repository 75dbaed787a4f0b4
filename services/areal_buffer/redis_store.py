"""The ledger's transitions, each one atomic Lua script in Redis."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar, cast

import redis.asyncio as redis
from redis.exceptions import RedisError

from areal import errors
from areal.chassis.waits import Waits
from areal.clients.redis_connection import redis_prefix
from areal.protocol.leases import LedgerStats, Registration, Take
from areal.types import Purpose, TaskState
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal_buffer import replies
from areal_buffer.config import BufferConfig
from areal_buffer.records import Completion, NewTask, Swept
from areal_buffer.replies import text
from areal_buffer.scripts import Scripts, translate

# Work of one script call: bounds how long Redis is busy with it.
_CHUNK_TASKS = 500
_CHUNK_BYTES = 8 * 1024 * 1024
_CHUNK_READ_GROUPS = 16
_FETCH_BYTES = 1024 * 1024
# Payloads that pass through Lua, which copies them: little, to save a small batch a call of Redis.
_ALONG_BYTES = 256 * 1024
# Which limit an attempt's end counts against, in the words of the scripts; drain: none.
_CAUSES = {
    pb.RETURN_CAUSE_DRAIN: "",
    pb.RETURN_CAUSE_WORKFLOW_ERROR: "workflow_error",
    pb.RETURN_CAUSE_INFRASTRUCTURE: "infrastructure",
}
T = TypeVar("T")


def _chunks(items: Sequence[T], size_of: Callable[[T], int]) -> Iterable[Sequence[T]]:
    """Yields at least one chunk, each bounded in number and bytes."""
    start, size = 0, 0
    for at, item in enumerate(items):
        size += size_of(item)
        if at > start and (at - start >= _CHUNK_TASKS or size > _CHUNK_BYTES):
            yield items[start:at]
            start, size = at, size_of(item)
    yield items[start:]


class RedisStore:
    """Every method is atomic (submit: per 500 tasks) and raises what the script refused with.

    Raises, all methods: Unavailable while Redis is away, CapacityExceeded when it is out of memory.
    """

    def __init__(self, client: redis.Redis, config: BufferConfig, waits: Waits) -> None:
        self._redis = client
        self._prefix = redis_prefix(config.namespace)
        self._lease_ttl_ms = config.lease_ttl_ms
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

    async def read(
        self, task_ids: Sequence[str], *, groups: bool
    ) -> AsyncIterator[trajectory_pb2.TaskRecord]:
        """Records in the order asked; unknown ids are left out."""
        async for task_id, row, payload in self._rows(task_ids, groups=groups):
            yield replies.task_record(task_id, row, payload)

    async def _rows(
        self, task_ids: Sequence[str], *, groups: bool
    ) -> AsyncIterator[tuple[str, replies.Row, bytes | None]]:
        """Yields the id of each known task, its `RECORD_FIELDS` and, if requested, its group."""
        size = _CHUNK_READ_GROUPS if groups else _CHUNK_TASKS
        for start in range(0, len(task_ids), size):
            chunk = task_ids[start : start + size]
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    for task_id in chunk:
                        pipe.hmget(f"{self._prefix}task:{task_id}", list(replies.RECORD_FIELDS))
                    if groups:
                        pipe.mget([f"{self._prefix}group:{task_id}" for task_id in chunk])
                    rows = await pipe.execute()
            except RedisError as error:
                raise translate(error) from None
            payloads = rows[-1] if groups else [None] * len(chunk)
            for task_id, row, payload in zip(chunk, rows, payloads, strict=False):
                values = dict(zip(replies.RECORD_FIELDS, row, strict=True))
                if values["state"] is not None:
                    yield task_id, values, payload

    async def mark_read(self, task_ids: Sequence[str]) -> None:
        """Results of these have been read: they are released some minutes later, or for room."""
        for start in range(0, len(task_ids), _CHUNK_TASKS):
            await self._scripts.run("read", *task_ids[start : start + _CHUNK_TASKS])

    async def ended(self, task_ids: Sequence[str], incarnation: int = 0) -> list[str]:
        """Returns tasks that have ended or are completed; an empty answer flags the wait.

        Raises:
            WorkflowError: The run of the waiting trainer (0: someone else) has been stopped.
        """
        found = await self._scripts.run("ended", incarnation, *task_ids)
        return [text(task_id) for task_id in found]

    # -- leases -------------------------------------------------------------------------------

    async def lease(self, worker_id: str, max_tasks: int, boot: int = 0) -> pb.LeaseTasksResponse:
        """Leases what admission allows now; the reason when that is nothing."""
        reply = await self._scripts.run("lease", worker_id, max_tasks, boot)
        return replies.leases(reply, self._lease_ttl_ms)

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
        self, groups: Sequence[Completion], *, limit: int
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

    async def reject(self, task_id: str, token: int, reason: str, group: bytes = b"") -> None:
        """Ends a task by its workflow's choice; `group`: what it made, if it did."""
        if group:
            await self._scripts.run_with("reject", [group], task_id, token, reason)
        else:
            await self._scripts.run("reject", task_id, token, reason)

    async def return_leases(
        self, ends: Sequence[pb.Return], *, limit: int
    ) -> list[TaskState | errors.ArealError]:
        """Returns leases, each by itself; for each its task's state, or why it was refused.

        Journals that pass the `limit`, in bytes, are dropped.
        """
        results: list[TaskState | errors.ArealError] = []
        if not ends:
            return results
        for chunk in _chunks(ends, lambda end: len(end.partial) + len(end.traceback)):
            args: list[str | int | bytes] = [limit]
            for end in chunk:
                args += [end.lease.task_id, end.lease.token, _CAUSES[end.cause], end.detail]
                args += [end.traceback, end.partial, end.failed_server, end.site]
            for reply in await self._scripts.run("return", *args):
                if isinstance(reply, RedisError):
                    results.append(translate(reply))
                else:
                    results.append(TaskState(text(reply)))
        return results

    async def sweep(self) -> Swept:
        """Does one bounded sweep of leases and deadlines."""
        return Swept(*(int(value) for value in await self._scripts.run("sweep")))

    # -- training -----------------------------------------------------------------------------

    async def register_trainer(
        self,
        resume_step: int,
        batch_size: int,
        eta: int,
        max_concurrent: int,
        recipe_digest: str = "",
    ) -> Registration:
        """Registers a trainer; returns its new incarnation."""
        args = (resume_step, batch_size, eta, max_concurrent, recipe_digest)
        reply = await self._scripts.run("register", *args)
        return Registration(*(int(value) for value in reply))

    async def take(
        self,
        incarnation: int,
        step: int,
        task_ids: Sequence[str],
        *,
        limit: int,
        with_groups: bool = False,
        refill_below: int = 0,
        confirmed: int | None = None,
    ) -> Take:
        """Tries once to take the batch of a step; `waiting` flags the wait.

        `limit`: bytes that the ledger may hold; near it, a commit is asked for where that helps.
        `with_groups` brings along the payloads of the first groups, as many as are small.
        `confirmed`: the newest version that a server serves; None: step - 1.
        """
        served = step - 1 if confirmed is None else confirmed
        along = _ALONG_BYTES if with_groups else 0
        reply = await self._scripts.run(
            "take", incarnation, step, limit, along, refill_below, served, *task_ids
        )
        return replies.take(reply)

    async def confirm(self, incarnation: int, version: int) -> int:
        """Records that a server serves a version; returns the policy version."""
        return int(await self._scripts.run("confirm", incarnation, version))

    async def fetch(
        self, incarnation: int, step: int, task_ids: Sequence[str]
    ) -> AsyncIterator[list[bytes]]:
        """Payloads of a step's groups as they are stored, in the order asked, some at once."""
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

    async def discarded(
        self, incarnation: int, step: int, start: int
    ) -> tuple[int, list[pb.Discarded]]:
        """Returns how many train tasks ended untrained before a step's batch, and some of them."""
        total, entries = await self._scripts.run(
            "discarded", incarnation, step, start, _CHUNK_BYTES
        )
        found = [replies.discarded(entry) for entry in entries]
        if found:
            names = [f"{self._prefix}spare:{each.task_id}/{each.token}" for each in found]
            try:
                payloads = cast("list[bytes | None]", await self._redis.mget(names))
            except RedisError as error:
                raise translate(error) from None
            for each, payload in zip(found, payloads, strict=True):
                each.group = payload or b""  # released for room
        return int(total), found

    async def commit(self, incarnation: int, step: int, oldest_retained_step: int) -> int:
        """Ends steps as trained, releases payloads; returns the last committed step."""
        return int(await self._scripts.run("commit", incarnation, step, oldest_retained_step))

    # -- looking ------------------------------------------------------------------------------

    async def dead_letters(self, limit: int) -> AsyncIterator[pb.DeadLetter]:
        """Yields the dead letters, newest first."""
        try:
            ids = await self._redis.zrevrange(f"{self._prefix}dead", 0, limit - 1)
        except RedisError as error:
            raise translate(error) from None
        async for task_id, row, _ in self._rows([text(each) for each in ids], groups=False):
            yield replies.dead_letter(task_id, row)

    async def retry_dead_letters(self, task_ids: Sequence[str]) -> int:
        """Queues dead letters (empty: all) again; returns how many."""
        return await self._with_dead_letters("retry", task_ids)

    async def drop_dead_letters(self, task_ids: Sequence[str]) -> int:
        """Removes dead letters (empty: all) from the list permanently; returns how many."""
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

    async def stats(self) -> LedgerStats:
        """Returns the ledger's counters and gauges."""
        return replies.stats(await self._scripts.run("stats"))

    async def memory(self) -> tuple[int, int]:
        """Returns the bytes that Redis uses for all its runs, and its own limit (0: none).

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
                f"endpoints.redis: its maxmemory-policy {policy!r} evicts tasks when memory is "
                "full, expected noeviction"
            )
        return int(info["used_memory"]), limit

    # -- recipes ------------------------------------------------------------------------------

    async def put_recipe(self, digest: str, file_name: str, source: bytes) -> None:
        """Stores a recipe's source; those used longest ago go when there are many."""
        await self._scripts.run("put_recipe", digest, file_name, source)

    async def recipes_used(self, digests: Iterable[str]) -> None:
        """Notes that recipes are needed now, so that others go before them."""
        now = {digest: time.time_ns() // 1_000_000 for digest in digests if digest}
        try:
            if now:
                await self._redis.zadd(f"{self._prefix}recipes", now, xx=True)
        except RedisError as error:
            raise translate(error) from None

    async def get_recipe(self, digest: str) -> tuple[str, bytes] | None:
        """Returns (file name, source), or None."""
        try:
            name, source = await self._redis.hmget(
                f"{self._prefix}recipe:{digest}", ["file_name", "source"]
            )
        except RedisError as error:
            raise translate(error) from None
        return None if source is None else (text(name), cast("bytes", source))
