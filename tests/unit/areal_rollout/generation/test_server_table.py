import asyncio
import time

from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.generation.server_table import ServerTable


def listed(name, version=0, state=ServerState.SERVING, cause=""):
    return InferenceServer(name, f"http://{name}", state, version, cause)


def chosen(table, min_version=0, key="", cost=10, avoid=()):
    server = table.choose(min_version, key, cost, avoid)
    return None if server is None else server.url.removeprefix("http://")


def all_chosen(table, min_version=0):
    """Each of the admissible ones: the one chosen has more to do from then on."""
    names = set()
    for _ in range(20):
        server = table.choose(min_version, "", 1)
        server.outstanding += 1
        names.add(server.url.removeprefix("http://"))
    return names


async def test_choose_when_servers_differ_in_load_then_takes_the_least_loaded():
    table = ServerTable()
    table.update([listed("a"), listed("b")])
    table.choose(0, "", 10).outstanding += 10
    counts = []
    for _ in range(4):
        server = table.choose(0, "", 10)
        server.outstanding += 10
        counts.append(server.url)
    assert {counts.count("http://a"), counts.count("http://b")} == {2}
    loads = [table.choose(0, "", 1, avoid=[u]).outstanding for u in ("http://a", "http://b")]
    assert sorted(loads) == [20, 30]


async def test_choose_when_thousand_servers_then_load_stays_even():
    table = ServerTable()
    table.update([listed(f"s{i}") for i in range(1000)])
    for _ in range(20_000):
        table.choose(0, "", 1).outstanding += 1
    loads = [s.outstanding for s in table._servers.values()]
    assert sum(loads) == 20_000
    assert max(loads) <= 24
    assert min(loads) >= 14


async def test_choose_when_only_some_are_new_enough_then_only_those():
    table = ServerTable()
    table.update(
        [
            listed("old", 3),
            listed("new", 4),
            listed("syncing", 5, ServerState.SYNCING),
            listed("draining", 5, ServerState.DRAINING),
            listed("never", -1),
        ]
    )
    assert {chosen(table, 4) for _ in range(20)} == {"new"}
    assert chosen(table, 5) is None
    assert len(table) == 2


async def test_choose_when_key_is_shared_then_stays_together_until_that_is_much_slower():
    table = ServerTable()
    table.update([listed("a"), listed("b")])
    first = table.choose(0, "group", 10)
    first.outstanding += 10
    for _ in range(15):
        again = table.choose(0, "group", 10)
        assert again is first
        again.outstanding += 10
    first.outstanding += 1000
    assert table.choose(0, "group", 10) is not first


async def test_choose_when_affine_server_leaves_then_another_is_taken():
    table = ServerTable()
    table.update([listed("a"), listed("b")])
    held = chosen(table, key="g")
    other = "b" if held == "a" else "a"
    table.update([listed(held, 0, ServerState.DRAINING), listed(other)])
    assert chosen(table, key="g") == other
    table.update([listed(other)])
    assert chosen(table, key="g") == other


async def test_failed_when_called_then_others_are_preferred_and_a_burst_counts_once():
    table = ServerTable()
    table.update([listed("a"), listed("b")])
    server = table.choose(0, "", 1, avoid=["http://b"])
    assert table.failed(server) is True
    assert table.failed(server) is False
    assert server.failures == 1
    assert {chosen(table) for _ in range(10)} == {"b"}
    # One that is avoided but open is better than one that is blocked.
    assert chosen(table, avoid=["http://b"]) == "b"


async def test_choose_when_all_are_blocked_then_changed_returns_when_a_block_ends():
    table = ServerTable()
    table.update([listed("a")])
    table.failed(table.choose(0, "", 1))
    assert chosen(table) is None
    start = time.monotonic()
    await table.changed(60.0)
    assert 0.15 < time.monotonic() - start < 50.0
    assert chosen(table) == "a"


async def test_choose_when_all_are_blocked_and_thousands_wait_then_looked_through_once():
    table = ServerTable()
    table.update([listed(f"s{i}") for i in range(50)])
    servers = list(table._servers.values())
    for server in servers:
        table.failed(server)
    looks = []
    choose = table._router.choose
    table._router.choose = lambda *args, **kwargs: looks.append(1) or choose(*args, **kwargs)
    for _ in range(1000):
        assert chosen(table) is None
    assert len(looks) == 1
    await table.changed(60.0)
    assert chosen(table) is not None
    table.failed(servers[0])  # the rest is open
    assert {chosen(table) for _ in range(20)} - {"s0"}


async def test_choose_when_a_blocked_server_serves_anew_then_it_is_taken_at_once():
    table = ServerTable()
    table.update([listed("a")])
    table.failed(table.choose(0, "", 1))
    assert chosen(table) is None
    table.update([listed("a", state=ServerState.QUARANTINED)])
    assert len(table) == 0
    table.update([listed("a")])
    assert len(table) == 1
    assert chosen(table) == "a"


async def test_changed_when_a_version_arrives_then_wakes_at_once():
    table = ServerTable()
    table.update([listed("a", 1)])
    waiting = [asyncio.create_task(table.changed(60.0)) for _ in range(100)]
    await asyncio.sleep(0)
    table.update([listed("a", 1)])
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    table.update([listed("a", 2)])
    await asyncio.wait_for(asyncio.gather(*waiting), 30.0)
    assert chosen(table, 2) == "a"


async def test_update_when_server_is_quarantined_or_gone_then_its_requests_are_given_up():
    for after in ([listed("a", 0, ServerState.QUARANTINED, "no answer")], []):
        table = ServerTable()
        table.update([listed("a")])
        server = table.choose(0, "", 1)

        async def request(server=server):
            async with asyncio.timeout(30.0) as scope:
                server.running.add(scope)
                await asyncio.Event().wait()

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        table.update(after)
        done, _ = await asyncio.wait({task}, timeout=20.0)
        assert done
        assert isinstance(task.exception(), TimeoutError)


async def test_update_when_server_only_syncs_then_its_requests_go_on():
    table = ServerTable()
    table.update([listed("a")])
    server = table.choose(0, "", 1)
    async with asyncio.timeout(30.0) as scope:
        server.running.add(scope)
        table.update([listed("a", 0, ServerState.SYNCING)])
        await asyncio.sleep(0.01)
    assert chosen(table) is None


async def test_change_when_some_are_told_of_then_the_others_stay_as_they_were():
    table = ServerTable()
    table.update([listed("a", 1), listed("b", 1), listed("c", 1)])
    table.change([listed("b", 2), listed("d", 2)], ["c", "unknown"])
    assert all_chosen(table, 2) == {"b", "d"}
    assert all_chosen(table, 1) == {"a", "b", "d"}
    assert len(table) == 3


async def test_change_when_an_id_has_another_url_then_the_request_there_is_given_up():
    table = ServerTable()
    table.update([listed("a")])
    before = table.choose(0, "g", 1)
    async with asyncio.timeout(30.0) as scope:
        before.running.add(scope)
        await asyncio.sleep(0)
        table.change([InferenceServer("a", "https://a", ServerState.SERVING, 0)], [])
        assert scope.when() <= asyncio.get_running_loop().time()
        scope.reschedule(None)
    assert table.choose(0, "g", 1).url == "https://a"


async def test_describe_when_many_servers_then_bounded_and_names_causes():
    table = ServerTable()
    assert table.describe() == "no server is known"
    table.update([listed(f"s{i}", 1, ServerState.QUARANTINED, "lies") for i in range(9)])
    assert "http://s0 quarantined at version 1: lies" in table.describe()
    assert table.describe().endswith("and 4 more")
