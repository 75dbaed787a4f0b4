import asyncio

from tests.waiting import until

from areal.errors import Unavailable
from areal.weights.servers import InferenceServer, ServerChanges, ServerState
from areal_rollout.generation.server_table import ServerTable
from areal_rollout.server_refresh import ServerRefresh


class WeightSync:
    def __init__(self):
        self.version, self.calls, self.away = 0, 0, False
        self.asked = []
        self.answers = []

    async def list_changes(self, as_of):
        self.calls += 1
        self.asked.append(as_of)
        if self.away:
            raise Unavailable("away")
        if self.answers:
            return self.answers.pop(0)
        return ServerChanges((serving("a", self.version),), as_of=str(self.version))


def serving(name, version):
    return InferenceServer(name, f"http://{name}", ServerState.SERVING, version)


def version_of(table):
    server = table.choose(0, "", 1)
    return None if server is None else server.version


async def test_refresh_when_announced_then_the_table_follows_at_once(monkeypatch):
    # By itself it would look once in an hour.
    monkeypatch.setattr("areal_rollout.server_refresh._REFRESH_S", 3600.0)
    table, sync = ServerTable(), WeightSync()
    refresh = ServerRefresh(table, sync.list_changes)
    task = asyncio.create_task(refresh.follow())
    await until(lambda: version_of(table) == 0)
    for version in (1, 2, 3):
        sync.version = version
        refresh.announce()
        await until(lambda: version_of(table) == version)  # noqa: B023
    task.cancel()


async def test_refresh_when_announced_in_a_burst_then_asks_only_a_few_times():
    sync = WeightSync()
    refresh = ServerRefresh(ServerTable(), sync.list_changes)
    task = asyncio.create_task(refresh.follow())
    await asyncio.sleep(0.01)
    before = sync.calls
    for _ in range(1000):
        refresh.announce()
    await asyncio.sleep(0.05)
    assert sync.calls - before <= 2
    task.cancel()


async def test_refresh_when_weight_sync_is_away_then_the_last_answer_stands():
    table, sync = ServerTable(), WeightSync()
    refresh = ServerRefresh(table, sync.list_changes)
    await refresh.once()
    sync.away = True
    await refresh.once()
    assert version_of(table) == 0
    sync.away, sync.version = False, 4
    await refresh.once()
    assert version_of(table) == 4


async def test_refresh_when_told_of_changes_then_asks_from_there_and_keeps_the_rest():
    table, sync = ServerTable(), WeightSync()
    sync.answers = [
        ServerChanges((serving("a", 1), serving("b", 1), serving("c", 1)), as_of="x:3"),
        ServerChanges((serving("b", 2),), ("c",), whole=False, as_of="x:5"),
        ServerChanges((), whole=False, as_of="x:5"),
        ServerChanges((serving("b", 2),), as_of="y:1"),  # another coordinator: everything
    ]
    refresh = ServerRefresh(table, sync.list_changes)
    known = []
    for _ in range(4):
        await refresh.once()
        known.append(set())
        for _ in range(20):  # the one chosen has more to do from then on
            server = table.choose(0, "", 1)
            server.outstanding += 1
            known[-1].add(server.url[-1])
    assert sync.asked == ["", "x:3", "x:5", "x:5"]
    assert known == [{"a", "b", "c"}, {"a", "b"}, {"a", "b"}, {"b"}]
