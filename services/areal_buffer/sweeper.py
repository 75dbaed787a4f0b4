"""What every buffer process does beside answering calls: sweep, sample, listen for wake-ups.

| loop   | consumes                     | waits for            | when Redis is away            |
|--------|------------------------------|----------------------|-------------------------------|
| sweep  | leases, deadlines, results   | the sweep interval   | continues; the first sweep after|
|        |                              |                      | an outage extends all leases  |
| sample | INFO memory, the counters    | one second           | keeps the last figures        |
| listen | published wake-ups           | the next message     | subscribes again, wakes all   |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import redis.asyncio as redis
from redis.exceptions import RedisError

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.chassis.waits import Wait
from areal.errors import ArealError
from areal_buffer.ledger import Kind, Wakes
from areal_buffer.metrics import BufferMetrics
from areal_buffer.records import MemoryGauge
from areal_buffer.redis_store import RedisStore

_SAMPLE_S = 1.0
# A script handles at most this many; full rounds are repeated at once.
_SWEEP_LIMIT = 500


class Sweeper:
    """The three loops; each runs until cancelled."""

    def __init__(
        self,
        store: RedisStore,
        wakes: Wakes,
        memory: MemoryGauge,
        metrics: BufferMetrics,
        interval_s: float,
    ) -> None:
        self._store = store
        self._wakes = wakes
        self._memory = memory
        self._metrics = metrics
        self._interval_s = interval_s
        self._oldest_queued: tuple[float, str] | None = None
        self._log = get_logger(__name__)

    async def sweep_forever(self) -> None:
        """Sweeps at every interval until cancelled."""
        while True:
            try:
                await self._sweep_once()
            except ArealError as error:
                self._log.warning("sweep_failed", error=str(error))
            await asyncio.sleep(self._interval_s)

    async def _sweep_once(self) -> None:
        while True:
            swept = await self._store.sweep()
            self._metrics.swept(swept)
            if swept.extended:
                self._log.warning(
                    "leases_extended", leases=swept.extended, outage_s=swept.gap_ms / 1000
                )
            if swept.requeued or swept.expired:
                self._log.info("swept", leases=swept.requeued, tasks=swept.expired)
            if max(swept.requeued, swept.expired, swept.released) < _SWEEP_LIMIT:
                return

    async def sample_forever(self) -> None:
        """Samples memory and counters every second."""
        while True:
            try:
                await self.sample()
            except ArealError as error:
                self._log.warning("sample_failed", error=str(error))
            await asyncio.sleep(_SAMPLE_S)

    async def sample(self) -> None:
        """Reads memory and counters once; raises Unavailable."""
        stats = await self._store.stats()
        self._memory.sample(stats.held_bytes, *await self._store.memory())
        age_s = 0.0
        self._oldest_queued = None
        if stats.oldest_queued_time is not None:
            age_s = max(0.0, time.time() - stats.oldest_queued_time)
            room = "a rollout worker" if stats.admission_headroom > 0 else "admission: the trainer"
            self._oldest_queued = (time.monotonic() - age_s, room)
        self._metrics.sampled(stats, self._memory, age_s)

    def waits(self) -> Iterator[Wait]:
        """Yields the oldest queued task, for the watchdog."""
        if self._oldest_queued is not None:
            since, whom = self._oldest_queued
            yield Wait("queued_task", whom, time.monotonic() - since)

    async def listen_forever(self, client: redis.Redis) -> None:
        """Turns published wake-ups into events."""
        backoff = Backoff()
        while True:
            try:
                async with client.pubsub() as channel:
                    await channel.subscribe(self._store.wake_channel)
                    while True:
                        message = await channel.get_message(timeout=5.0)
                        if message is None:
                            continue
                        if message["type"] == "message":
                            self._wakes.notify(Kind(message["data"].decode()))
                            continue
                        # Subscribed, perhaps again: the client does so by itself when it has lost
                        # its connection. Something may have happened while no one listened.
                        backoff.reset()
                        self._wakes.notify_all()
            except (RedisError, OSError) as error:
                self._log.warning("wake_channel_lost", error=str(error))
            await backoff.sleep()
