import asyncio
import time

from areal.engines.server_table import ServerTable
from areal.errors import Unavailable
from areal.servers import InferenceServer, ServerState
from areal_rollout.membership import Membership


class WeightSync:
    def __init__(self):
        self.version, self.calls, self.away = 0, 0, False

    async def list_servers(self):
        self.calls += 1
        if self.away:
            raise Unavailable("away")
        server = InferenceServer("a", "http://a", ServerState.SERVING, self.version)
        return [server], self.version


def version_of(table):
    server = table.choose(0, "", 1)
    return None if server is None else server.version


async def test_membership_when_announced_then_the_table_follows_within_milliseconds():
    table, sync = ServerTable(), WeightSync()
    membership = Membership(table, sync.list_servers)
    task = asyncio.create_task(membership.follow())
    await asyncio.sleep(0.01)
    assert version_of(table) == 0
    for version in (1, 2, 3):
        sync.version = version
        start = time.monotonic()
        membership.announce()
        while version_of(table) != version:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert time.monotonic() - start < 0.05
    task.cancel()


async def test_membership_when_announced_in_a_burst_then_asks_only_a_few_times():
    sync = WeightSync()
    membership = Membership(ServerTable(), sync.list_servers)
    task = asyncio.create_task(membership.follow())
    await asyncio.sleep(0.01)
    before = sync.calls
    for _ in range(1000):
        membership.announce()
    await asyncio.sleep(0.05)
    assert sync.calls - before <= 2
    task.cancel()


async def test_membership_when_weight_sync_is_away_then_the_last_answer_stands():
    table, sync = ServerTable(), WeightSync()
    membership = Membership(table, sync.list_servers)
    await membership.refresh()
    sync.away = True
    await membership.refresh()
    assert version_of(table) == 0
    sync.away, sync.version = False, 4
    await membership.refresh()
    assert version_of(table) == 4
