"""Builders for tests of the ledger: small tasks, groups, and a store on a real Redis."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from redis.asyncio import Redis

from areal.chassis.waits import Waits
from areal.clients.redis_connection import connect_redis
from areal.errors import ArealError
from areal.protocol.trajectories import STATE_FROM_PB, pack_group, task_to_pb
from areal.types import Purpose, Task, TaskState, Trajectory, TrajectoryGroup, WorkflowSpec
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer.config import BufferConfig
from areal_buffer.records import ENDED_BYTES, RECORD_BYTES, Completion, NewTask
from areal_buffer.redis_store import RedisStore


def make_task(
    task_id: str,
    purpose: Purpose = Purpose.TRAIN,
    position: tuple[int, int] | None = None,
    time_to_live_s: float | None = None,
) -> Task:
    return Task(
        task_id=task_id,
        purpose=purpose,
        workflow=WorkflowSpec(name="rlvr"),
        data={"question": "1+1", "answer": "2"},
        position=position,
        time_to_live_s=time_to_live_s,
    )


def new_task(task_id: str, purpose: Purpose = Purpose.TRAIN, **more: object) -> NewTask:
    ttl = more.get("time_to_live_ms")
    return NewTask(
        task_id=task_id,
        purpose=purpose,
        body=task_to_pb(make_task(task_id, purpose)).SerializeToString(),
        position=more.get("position"),  # type: ignore[arg-type]
        time_to_live_ms=ttl,  # type: ignore[arg-type]
    )


def make_group(
    task_id: str, version: int = 0, samples: int = 2, length: int = 6
) -> TrajectoryGroup:
    """Two prompt tokens, the rest sampled at `version`."""
    prompt = np.arange(length) < 2
    return TrajectoryGroup(
        task_id=task_id,
        trajectories=[
            Trajectory(
                trajectory_id=f"{task_id}.{sample}",
                input_ids=np.arange(length, dtype=np.int32) + sample,
                loss_mask=~prompt,
                behavior_logprobs=np.where(prompt, 0.0, -0.5).astype(np.float32),
                token_versions=np.where(prompt, -1, version).astype(np.int32),
                rewards=np.where(np.arange(length) == length - 1, 1.0, 0.0).astype(np.float32),
            )
            for sample in range(samples)
        ],
    )


def incompressible(task_id: str) -> TrajectoryGroup:
    """A group of 2 MiB that compression saves little of."""
    length = (2 << 20) // 4
    group = make_group(task_id, samples=1, length=length)
    noise = np.random.default_rng(0).uniform(-9, 0, length).astype(np.float32)
    group.trajectories[0].behavior_logprobs[2:] = noise[2:]
    return group


def finished(task_id: str, version: int = 0) -> Completion:
    group = make_group(task_id, version)
    return Completion(
        task_id=task_id,
        token=0,
        payload=pack_group(group),
        head_version=version,
        lengths=tuple(len(each.input_ids) for each in group.trajectories),
        generated_tokens=8,
        mean_reward=1.0,
    )


EMPTY, FULL = 2**50, -(2**50)
"""Limits of memory that any ledger is far below of, and above of."""


async def complete(store: RedisStore, token: int, group: Completion, *, limit: int = EMPTY) -> bool:
    """Records one group; raises what it was refused for."""
    (result,) = await store.complete([replace(group, token=token)], limit=limit)
    if isinstance(result, ArealError):
        raise result
    return result


def returned(
    task_id: str,
    token: int,
    cause: str = "drain",
    partial: bytes = b"",
    failed_server: str = "",
    *,
    detail: str = "why",
    site: str = "",
) -> pb.Return:
    return pb.Return(
        lease=pb.LeaseRef(task_id=task_id, token=token),
        cause=pb.ReturnCause.Value(f"RETURN_CAUSE_{cause.upper()}"),
        detail=detail,
        traceback="where",
        partial=partial,
        failed_server=failed_server,
        site=site,
    )


async def return_lease(store: RedisStore, end: pb.Return, *, limit: int = EMPTY) -> TaskState:
    """Returns one lease; raises what it was refused for."""
    (result,) = await store.return_leases([end], limit=limit)
    if isinstance(result, ArealError):
        raise result
    return result


def ledger_config(url: str, **changes: object) -> BufferConfig:
    values: dict[str, object] = {
        "namespace": f"test/{uuid.uuid4().hex[:12]}",
        "redis_url": url,
        "batch_size": 2,
        "max_head_offpolicyness": 1,
        "max_concurrent_rollouts": 100,
        "lease_ttl_ms": 60_000,
        "sweep_interval_ms": 5_000,
        "straggler_deadline_ms": 60_000,
        "max_attempts": 2,
        "max_failure_ratio": 1.0,
        "max_infrastructure_attempts": 3,
        "serve_result_ttl_ms": 60_000,
        "max_group_bytes": 1_000_000,
        "kept_place_ms": 10**9,
        "max_memory_bytes": 2**40,
        "spare_bytes": 2**36,
    }
    return BufferConfig(**{**values, **changes})  # type: ignore[arg-type]


class Book:
    """A store with the shortest ways to say what a test does."""

    def __init__(self, store: RedisStore, client: Redis, prefix: str) -> None:
        self.store = store
        self.redis = client
        self.prefix = prefix
        self.namespace = prefix.split("{")[1].split("}", maxsplit=1)[0]
        self.incarnation = 0

    async def submit(
        self, *ids: str, purpose: Purpose = Purpose.TRAIN, **more: object
    ) -> list[bool]:
        options = {"incarnation": 0, "seal": False, "limit": EMPTY}
        options.update({key: more.pop(key) for key in list(more) if key in options})  # type: ignore[arg-type]
        tasks = [new_task(task_id, purpose, **more) for task_id in ids]
        return await self.store.submit(tasks, **options)  # type: ignore[arg-type]

    async def lease(self, n: int = 1, worker: str = "w", boot: int = 0) -> dict[str, int]:
        """id -> token."""
        leases, _ = await self.leases(n, worker, boot)
        return {lease.task.task_id: lease.token for lease in leases}

    async def leases(
        self, n: int = 1, worker: str = "w", boot: int = 0
    ) -> tuple[list[pb.Lease], str]:
        """Leases, or the reason for having none."""
        found = await self.store.lease(worker, n, boot)
        return list(found.leases), found.reason

    async def complete(
        self, task_id: str, token: int, version: int = 0, limit: int = EMPTY
    ) -> bool:
        return await complete(self.store, token, finished(task_id, version), limit=limit)

    async def return_lease(
        self, task_id: str, token: int, cause: str = "drain", limit: int = EMPTY, **more: object
    ) -> str:
        lease = returned(task_id, token, cause, **more)  # type: ignore[arg-type]
        return await return_lease(self.store, lease, limit=limit)

    async def run(self, *ids: str, version: int = 0) -> None:
        """Submits, leases and completes exactly these."""
        await self.submit(*ids)
        leases = await self.lease(len(ids))
        assert set(leases) == set(ids), leases
        for task_id in ids:
            await self.complete(task_id, leases[task_id], version)

    async def register(
        self, resume: int = 0, size: int = 2, eta: int = 1, concurrent: int = 100
    ) -> int:
        self.incarnation = (
            await self.store.register_trainer(resume, size, eta, concurrent)
        ).incarnation
        return self.incarnation

    async def take(self, step: int, *ids: str, limit: int = EMPTY) -> tuple[str, list[str]]:
        """(state, ids of the batch)."""
        taken = await self.store.take(self.incarnation, step, ids, limit=limit)
        return taken.state, [group.task_id for group in taken.groups]

    async def train(self, steps: int) -> list[list[str]]:
        """Runs that many steps of two groups; returns the batches."""
        batches = []
        for step in range(1, steps + 1):
            assert (await self.take(step))[0] == "waiting"
            await self.run(f"s{step}a", f"s{step}b", version=step - 1)
            state, ids = await self.take(step)
            assert state == "taken", f"step {step}: {state}"
            batches.append(ids)
        return batches

    async def state(self, task_id: str) -> str:
        async for record in self.store.read([task_id], groups=False):
            return STATE_FROM_PB[record.state].value
        return ""

    async def expire_lease(self, task_id: str) -> None:
        """As if its holder had been silent for a lease's lifetime, then a sweep."""
        for purpose in Purpose:
            await self.redis.zadd(f"{self.prefix}running:{purpose}", {task_id: 1}, xx=True)
        await self.redis.hdel(f"{self.prefix}meta", "last_sweep")  # however long ago it was
        await self.store.sweep()

    async def pass_straggler_deadline(self) -> None:
        await self.redis.hset(f"{self.prefix}meta", "take_since", 1)

    async def pass_kept_places(self) -> None:
        """As if no agent that was refused a session had asked again for long."""
        for purpose in Purpose:
            if int(await self.redis.hget(f"{self.prefix}meta", f"kept_{purpose}") or 0) > 0:
                await self.redis.hset(f"{self.prefix}meta", f"kept_{purpose}", 1)

    async def pass_time(self, *indexes: str) -> None:
        """As if all that is in `results` or `read` had been there for long."""
        for index in indexes:
            for task_id in await self.redis.zrange(f"{self.prefix}{index}", 0, -1):
                await self.redis.zadd(f"{self.prefix}{index}", {task_id: 1})

    async def held(self) -> tuple[int, int]:
        """Bytes of train and serve tasks, as the ledger counts them."""
        train, serve = await self.redis.hmget(f"{self.prefix}meta", "bytes:train", "bytes:serve")
        return int(train or 0), int(serve or 0)

    async def recount(self) -> tuple[int, int]:
        """The same, from what is there."""
        held = {b"train": 0, b"serve": 0}
        for key in await self.redis.keys(f"{self.prefix}task:*"):
            task = await self.redis.hgetall(key)
            group = await self.redis.strlen(key.replace(b"}:task:", b"}:group:"))
            names = (b"body", b"partial", b"traceback", b"keys", b"salt")
            parts = [task.get(name, b"") for name in names]
            calls = await self.redis.keys(key.replace(b"}:task:", b"}:calls:") + b"/*")
            for each in calls:
                fields = await self.redis.hgetall(each)
                # A field costs 40 bytes beside its value.
                parts += [value + bytes(40) for name, value in fields.items() if name != b"calls"]
            gone = b"submitted" not in task and b"sessions" not in task
            record = ENDED_BYTES if gone else RECORD_BYTES
            held[task[b"purpose"]] += record + sum(map(len, parts)) + group
        for key in await self.redis.keys(f"{self.prefix}recipe:*"):
            recipe = await self.redis.hgetall(key)
            held[b"serve"] += RECORD_BYTES + len(recipe[b"file_name"]) + len(recipe[b"source"])
        for key in await self.redis.keys(f"{self.prefix}spare:*"):
            held[b"train"] += await self.redis.strlen(key)
        return held[b"train"], held[b"serve"]

    async def counts(self) -> dict[str, int]:
        """States that have tasks; checks that all add up."""
        stats = await self.store.stats()
        assert sum(stats.counts.values()) == stats.submitted, stats
        assert min(stats.counts.values()) >= 0, stats
        return {state.value: tasks for state, tasks in stats.counts.items() if tasks}


@asynccontextmanager
async def open_book(url: str, **changes: object) -> AsyncIterator[Book]:
    config = ledger_config(url, **changes)
    client = connect_redis(url)
    try:
        store = RedisStore(client, config, Waits())
        yield Book(store, client, store.wake_channel.removesuffix("wake"))
    finally:
        await client.aclose()
