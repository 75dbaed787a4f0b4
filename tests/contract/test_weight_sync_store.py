"""What weight-sync remembers in Redis, through an outage and beside another coordinator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from tests.unit.areal_weight_sync.coordinator_rig import rig_of

from areal.chassis.waits import Waits
from areal.clients.redis_connection import connect_redis
from areal.errors import StaleIncarnation, Unavailable, WrongStep
from areal.weights.manifest import PolicyVersion
from areal_weight_sync.interfaces import Totals
from areal_weight_sync.server_state import ServerRecord
from areal_weight_sync.store.redis import LeaseTaken, RedisStore

TTL_S = 0.3


@pytest.fixture
async def redis(redis_process: str) -> AsyncIterator[Redis]:
    async with connect_redis(redis_process) as client:
        yield client


@pytest.fixture
def namespace() -> str:
    return f"test/{uuid.uuid4().hex[:12]}"


async def names(store: RedisStore) -> list[str]:
    return [record.server_id for record in (await store.load()).records]


async def test_persist_when_a_save_fails_then_the_same_records_are_saved_afterwards(
    redis: Redis, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(redis, namespace, TTL_S, Waits())
    await store.acquire()
    saved, tries, save = asyncio.Event(), [], store.save

    async def away_once(records: dict[str, ServerRecord | None], totals: Totals) -> None:
        tries.append(set(records))
        if len(tries) == 1:
            raise Unavailable("redis: Connection refused")
        await save(records, totals)
        saved.set()

    monkeypatch.setattr(store, "save", away_once)
    async with rig_of(tmp_path, probe_interval_s=60.0) as rig:
        await rig.serving("a")
        # From here on nothing changes: what is not kept is never written.
        rig._keep(store.persist(rig.coordinator), "persist")
        await asyncio.wait_for(saved.wait(), 20)
    assert tries == [{"a"}, {"a"}]
    assert await names(store) == ["a"]


async def test_save_when_the_lease_ran_out_in_an_outage_then_it_is_taken_again_and_written(
    redis: Redis, namespace: str
) -> None:
    store = RedisStore(redis, namespace, TTL_S, Waits())  # its lease is not taken
    await store.save({"a": ServerRecord("a", "http://a")}, Totals(server_updates=7))
    assert await names(store) == ["a"]
    assert (await store.load()).totals.server_updates == 7
    assert await store._hold() == store.owner


async def test_lease_when_another_coordinator_has_it_then_nothing_is_written_and_this_one_ends(
    redis: Redis, namespace: str
) -> None:
    store, other = (RedisStore(redis, namespace, ttl, Waits()) for ttl in (TTL_S, 60.0))
    await other.acquire()
    with pytest.raises(LeaseTaken, match=other.owner):
        await store.save({"a": ServerRecord("a", "http://a")}, Totals())
    assert await names(store) == []
    with pytest.raises(LeaseTaken, match=other.owner):
        await asyncio.wait_for(store.keep_lease(), 20)


async def test_publish_when_a_newer_trainer_has_only_registered_then_refused(
    redis: Redis, namespace: str
) -> None:
    store = RedisStore(redis, namespace, 60.0, Waits())
    await store.acquire()
    await store.publish(PolicyVersion(0, 0, "/model"))
    await redis.hset(store._ledger, "incarnation", "2")
    with pytest.raises(StaleIncarnation, match="incarnation 2 has registered"):
        await store.publish(PolicyVersion(1, 1, "/weights/v1-inc1"))
    await store.publish(PolicyVersion(1, 2, "/weights/v1-inc2"))


async def test_publish_when_the_answer_was_lost_then_the_next_trainer_publishes_the_same_version(
    redis: Redis, namespace: str
) -> None:
    store = RedisStore(redis, namespace, 60.0, Waits())
    await store.acquire()
    await store.publish(PolicyVersion(0, 0, "/model"))
    await store.publish(PolicyVersion(1, 1, "/weights/v1-inc1"))  # and its trainer dies unanswered
    await store.publish(PolicyVersion(1, 2, "/weights/v1-inc2"))
    current = (await store.load()).current
    assert current is not None
    assert (current.incarnation, current.path) == (2, "/weights/v1-inc2")
    with pytest.raises(StaleIncarnation):
        await store.publish(PolicyVersion(1, 1, "/weights/v1-inc1"))
    with pytest.raises(WrongStep, match="current version is 1"):
        await store.publish(PolicyVersion(1, 2, "/weights/elsewhere"))
    with pytest.raises(WrongStep, match="current version is 1"):
        await store.publish(PolicyVersion(0, 3, "/model"))
