"""Asks the other services how the run is; each loop survives their absence and restarts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.clients.buffer.tasks import BufferTasks
from areal.clients.trainer import TrainerClient
from areal.clients.weight_sync import WeightSyncClient
from areal.errors import ArealError
from areal.protocol.leases import LedgerStats
from areal_gateway.config import GatewayConfig
from areal_gateway.status import RunStatus

# Between two looks at a trainer that is done.
_OVER_S = 1.0
_VERSION_FIELDS = (
    "current_version",
    "confirmed_version",
    "confirmed_servers",
    "servers",
    "updates",
    "update_seconds_mean",
    "aborted_requests",
)


def ledger_json(stats: LedgerStats) -> dict[str, Any]:
    """Returns the ledger's statistics as plain types."""
    result = asdict(stats)
    for name in ("counts", "train_counts"):
        result[name] = {state.value: tasks for state, tasks in result[name].items()}
    return result


async def watch_clock(
    run: RunStatus,
    tasks: BufferTasks | None,
    weight_sync: WeightSyncClient | None,
    config: GatewayConfig,
) -> None:
    """Looks at the ledger and the servers at a steady pace; never returns."""

    async def ledger() -> None:
        assert tasks is not None
        try:
            run.put("ledger", ledger_json(await tasks.get_stats()))
        except ArealError as error:
            run.fail("ledger", str(error))

    async def servers() -> None:
        assert weight_sync is not None
        try:
            listed, _ = await weight_sync.list_servers()
            run.put(
                "servers",
                [asdict(s) for s in sorted(listed, key=lambda server: server.server_id)],
            )
        except ArealError as error:
            run.fail("servers", str(error))

    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        looks = [ledger()] if tasks else []
        looks += [servers()] if weight_sync else []
        await asyncio.gather(*looks)
        run.tick()
        due = max(due + config.interval_s, loop.time())
        await asyncio.sleep(due - loop.time())


async def watch_versions(run: RunStatus, weight_sync: WeightSyncClient) -> None:
    """Follows the policy versions; never returns."""
    log = get_logger(__name__)
    backoff = Backoff()
    while True:
        try:
            async with aclosing(weight_sync.watch()) as statuses:
                async for status in statuses:
                    backoff.reset()
                    run.put(
                        "versions",
                        {name: getattr(status, name) for name in _VERSION_FIELDS},
                    )
        except ArealError as error:
            log.info("versions_interrupted", error=str(error))
        await backoff.sleep()


async def watch_trainer(run: RunStatus, trainer: TrainerClient, config: GatewayConfig) -> None:
    """Follows the trainer's steps by long polls, across its restarts; never returns."""
    incarnation: int | None = None
    wait_s = 0.0
    backoff = Backoff()
    while True:
        try:
            status = await trainer.get_status(run.last_step, wait_s)
            if incarnation not in {None, status.incarnation}:
                # It resumed from a checkpoint: what was reported beyond that is trained again.
                status = await trainer.get_status(0)
                run.rewind(status.step)
        except ArealError as error:
            run.fail("trainer", str(error))
            wait_s = 0.0
            await backoff.sleep()
            continue
        backoff.reset()
        incarnation = status.incarnation
        run.add_rows(status.rows)
        fields = asdict(status)
        del fields["rows"]
        run.put("trainer", fields)
        # A finished trainer answers at once: a long poll would spin.
        over = status.state in {"finished", "failed"}
        if over and not status.rows:
            await asyncio.sleep(_OVER_S)
        wait_s = 0.0 if over else config.trainer_wait_s
