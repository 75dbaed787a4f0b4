"""The service as users run it: its own process, real Redis, NATS, gRPC, and inference servers."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack

import aiohttp
import nats
import pytest
from tests.containers import ContainerStore
from tests.integration.weight_sync_rig import (
    BadServer,
    WeightSyncRig,
    free_port,
    generate,
    inference,
)
from tests.nats_server import NatsServer
from tests.redis_server import RedisServer

from areal.clients.weight_sync import WeightSyncClient
from areal.errors import InvalidInput, NotFound, StaleIncarnation, WaitTimeout, WrongStep
from areal.servers import ServerState

pytestmark = pytest.mark.timeout(300)

SERVING, QUARANTINED = ServerState.SERVING, ServerState.QUARANTINED


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch

    from areal.models.tiny import make_tiny_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder, seed=0)
    return folder


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def nats_server(request, tmp_path):
    in_container = getattr(request, "param", "process") == "container"
    server = ContainerStore("nats") if in_container else NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def rig(tmp_path, redis, nats_server, model):
    async with AsyncExitStack() as stack:
        rig = WeightSyncRig(tmp_path, redis.url, nats_server.url, model, probe_interval_s=0.2)
        stack.push_async_callback(rig.close)
        await rig.started()
        yield rig


@pytest.fixture
async def bad():
    server = BadServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def good(rig, tmp_path, model):
    process, url = inference(tmp_path, model, "inference-good")
    process.start()
    await rig.client.register_server(url)
    yield process, url
    process.kill()


async def test_updates_when_requests_run_then_none_is_aborted_and_tokens_carry_versions(
    rig, tmp_path, model, good, nats_server, capsys
):
    second, second_url = inference(tmp_path, model, "inference-2")
    second.start()
    _, url = good
    try:
        await rig.client.register_server(second_url)
        connection = await nats.connect(nats_server.url)
        await rig.until(url, SERVING, 0)
        await rig.until(second_url, SERVING, 0)
        told = await rig.client.list_changes("")
        known = {server.server_id: server for server in told.servers}
        async with aiohttp.ClientSession() as session:
            running = [
                asyncio.create_task(generate(session, where, 600, 0))
                for where in (url, second_url)
                for _ in range(16)
            ]
            await asyncio.sleep(0.1)
            admissible = []
            for version in (1, 2, 3):
                prepared = await asyncio.to_thread(rig.make_version, version)
                await rig.client.publish_version(prepared)
                waiting = asyncio.create_task(rig.client.wait_confirmed(version, timeout=20))
                while not waiting.done():
                    servers, _ = await rig.client.list_servers()
                    admissible.append(any(s.state is SERVING for s in servers))
                    await asyncio.sleep(0.002)
                await waiting
            await rig.client.wait_for(
                "both at 3",
                lambda s: s.confirmed_servers == 2 and s.confirmed_version == 3,
                timeout=20,
            )
            answers = await asyncio.gather(*running)
        assert all(admissible)
        for answer in answers:
            info = answer["meta_info"]
            assert info["finish_reason"]["type"] == "length"
            spans = info["weight_versions"]
            assert [s["version"] for s in spans] == sorted({s["version"] for s in spans})
            assert spans[0]["start"] == 0
            assert spans[-1]["end"] == 600
        assert {s["version"] for a in answers for s in a["meta_info"]["weight_versions"]} >= {"3"}
        status = await rig.client.status()
        assert (status.updates, status.aborted_requests) == (3, 0)

        later = await rig.client.list_changes(told.as_of)
        assert (told.whole, later.whole, later.gone) == (True, False, ())
        known |= {server.server_id: server for server in later.servers}
        assert list(known.values()) == (await rig.client.list_servers())[0]
        assert (await rig.client.list_changes(later.as_of)).servers == ()
        assert status.update_seconds_mean == 0.0  # staged, then swapped in between two steps
        with capsys.disabled():
            print(f"\nupdate_seconds_mean, 16 requests each: {status.update_seconds_mean:.4f}")

        # Announced, and readable from the start by a late subscriber.
        subscription = await connection.jetstream().subscribe(
            "areal." + rig.namespace.replace("/", ".") + ".>", ordered_consumer=True
        )
        seen = set()
        async with asyncio.timeout(10):
            async for message in subscription.messages:
                body = json.loads(message.data)
                if message.subject.endswith(".versions"):
                    seen.add(("version", body["version"]))
                else:
                    seen.add((body["url"], body["state"], body["version"]))
                if {("version", 3), (url, "serving", 3), (second_url, "serving", 3)} <= seen:
                    break
        await connection.close()

        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{rig.metrics}/metrics") as response,
        ):
            text = await response.text()
        assert 'areal_weight_sync_servers{state="serving"} 2.0' in text
        assert "areal_weight_sync_current_version 3.0" in text
        await rig.client.drain_server(second_url, deadline=5)
        await rig.until(second_url, None)
        last = await rig.client.list_changes(later.as_of)
        assert (last.servers, len(last.gone), last.whole) == ((), 1, False)
        assert known[last.gone[0]].url == second_url
    finally:
        second.kill()


async def test_service_when_killed_then_resumes_and_reloads_nothing(rig, good):
    _, url = good
    await rig.until(url, SERVING, 0)
    await rig.publish(1)
    await rig.until(url, SERVING, 1)
    before = await rig.client.status()
    waiting = asyncio.create_task(rig.client.wait_confirmed(2, timeout=60))
    rig.process.kill()
    rig.process.start()
    await rig.until(url, SERVING, 1)
    after = await rig.client.status()
    assert (after.updates, after.confirmed_version) == (1, 1)
    assert after.update_seconds_mean == pytest.approx(before.update_seconds_mean)
    assert (await generate_info(url))["weight_version"] == "1"
    assert rig.process.log.count('"event": "updated"') == 2  # versions 0 and 1: none after the kill
    await rig.publish(2)
    assert (await waiting).confirmed_version == 2  # the watch outlived the service
    assert rig.process.stop() == 0


async def generate_info(url: str) -> dict:
    async with aiohttp.ClientSession() as session:
        return (await generate(session, url, 4, 1))["meta_info"]


async def test_inference_when_killed_then_noticed_and_rejoins_at_the_current_version(rig, good):
    process, url = good
    await rig.until(url, SERVING, 0)
    await rig.publish(1)
    await rig.until(url, SERVING, 1)
    process.kill()
    began = asyncio.get_running_loop().time()
    dead = await rig.until(url, QUARANTINED)
    # Within two seconds on a machine that is not overloaded.
    assert asyncio.get_running_loop().time() - began < 5.0
    assert "cannot connect" in dead.cause
    process.start()  # the same command: version "default", the weights of version 0
    await rig.until(url, SERVING, 1)
    assert (await generate_info(url))["weight_version"] == "1"


CAUSES = {
    "hang": "no answer within 2.0 s",
    "slow": "no answer within 2.0 s",
    "500": "HTTP 500: Internal Server Error: CUDA error",
    "garbage": "not a JSON object",
    "reset": "/",
    "lie": "reports weight_version '41'",
    "stale": "weights of version 1 differ from those of",
}


async def test_bad_servers_when_found_then_each_quarantined_by_name_and_heals(rig, good):
    _, url = good
    async with AsyncExitStack() as stack:
        bad = {mode: BadServer() for mode in CAUSES}
        for server in bad.values():
            await server.start()
            stack.push_async_callback(server.stop)
            await rig.client.register_server(server.url)
        for where in (url, *(server.url for server in bad.values())):
            await rig.until(where, SERVING, 0)
        for mode, server in bad.items():
            server.mode = mode
            if mode not in ("lie", "stale"):  # those are found out by the next update
                await rig.client.report_server(server.url, "request failed")
        prepared = await asyncio.to_thread(rig.make_version, 1)
        began = asyncio.get_running_loop().time()
        await rig.client.publish_version(prepared)
        await rig.until(url, SERVING, 1, timeout=10)
        assert asyncio.get_running_loop().time() - began < 5.0, "the others go on"
        for mode, server in bad.items():
            seen = await rig.until(server.url, QUARANTINED, timeout=15)
            assert CAUSES[mode] in seen.cause
            server.mode = "good"
            server.stop_hanging.set()
        for server in bad.values():
            await rig.until(server.url, SERVING, 1, timeout=40)
            assert not server.paused


async def test_stale_server_when_beside_one_real_engine_then_it_is_the_one_quarantined(
    rig, good, bad
):
    _, url = good
    await rig.client.register_server(bad.url)
    await rig.until(url, SERVING, 0)
    await rig.until(bad.url, SERVING, 0)
    bad.mode = "stale"  # answers faster than an engine that really loads: the first vote is its
    await rig.publish(1)
    await rig.until(url, SERVING, 1)
    assert CAUSES["stale"] in (await rig.until(bad.url, QUARANTINED)).cause


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_interrupt_when_not_in_place_then_requests_are_recomputed_or_aborted(
    tmp_path, redis, nats_server, model, mode
):
    process, url = inference(tmp_path, model, "inference")
    rig = WeightSyncRig(tmp_path, redis.url, nats_server.url, model, servers=(url,), interrupt=mode)
    process.start()
    try:
        await rig.started()
        await rig.until(url, SERVING, 0)
        async with aiohttp.ClientSession() as session:
            running = [asyncio.create_task(generate(session, url, 900, 0)) for _ in range(8)]
            prepared = await asyncio.to_thread(rig.make_version, 1)
            await rig.client.publish_version(prepared)
            await rig.until(url, SERVING, 1)
            infos = [answer["meta_info"] for answer in await asyncio.gather(*running)]
        status = await rig.client.status()
        if mode == "abort":
            assert {info["finish_reason"]["type"] for info in infos} == {"abort"}
            assert all(info["completion_tokens"] < 900 for info in infos)
            assert status.aborted_requests == 8
        else:
            assert {info["finish_reason"]["type"] for info in infos} == {"length"}
            assert {info["num_retractions"] for info in infos} == {1}
            assert status.aborted_requests == 0
    finally:
        await rig.close()
        process.kill()


async def test_redis_when_lost_for_a_while_then_nothing_is_lost(rig, good, redis):
    _, url = good
    await rig.until(url, SERVING, 0)
    redis.kill()
    publishing = asyncio.create_task(
        rig.client.publish_version(rig.make_version(1), timeout=10, retry_for=60)
    )
    await asyncio.sleep(4)  # longer than the lease
    assert (await rig.server(url)).state is SERVING
    assert not publishing.done()
    redis.start()
    assert await publishing == 1
    await rig.until(url, SERVING, 1)


@pytest.mark.parametrize("nats_server", ["process", "container"], indirect=True)
async def test_nats_when_lost_then_versions_go_on_and_announcements_resume(rig, bad, nats_server):
    await rig.client.register_server(bad.url)
    await rig.until(bad.url, SERVING, 0)
    nats_server.kill()
    await rig.publish(1)
    await rig.until(bad.url, SERVING, 1)
    nats_server.start()
    connection = await nats.connect(nats_server.url)
    subject = "areal." + rig.namespace.replace("/", ".") + ".versions"
    async with asyncio.timeout(20):
        while True:
            try:
                subscription = await connection.jetstream().subscribe(
                    subject, ordered_consumer=True
                )
                break
            except nats.js.errors.NotFoundError:
                await asyncio.sleep(0.1)
        message = await anext(aiter(subscription.messages))
    assert json.loads(message.data)["version"] == 1
    await connection.close()


async def test_standby_when_the_active_dies_then_takes_over(rig, bad):
    address = f"127.0.0.1:{free_port()}"
    standby = rig.replica("standby", address, f"127.0.0.1:{free_port()}")
    standby.start()
    client = WeightSyncClient(address)
    try:
        await rig.client.register_server(bad.url)
        await rig.until(bad.url, SERVING, 0)
        await rig.publish(1)
        await rig.until(bad.url, SERVING, 1)
        with pytest.raises(WaitTimeout, match="does not answer"):
            await client.wait_confirmed(1, timeout=3)
        rig.process.kill()
        status = await client.wait_for(
            "the standby", lambda s: s.confirmed_servers == 1, timeout=15
        )
        assert status.current_version == 1
        # The one before comes back (say, from a long stop) and finds it is not active any more.
        rig.process.start()
        with pytest.raises(WaitTimeout):
            await rig.client.wait_confirmed(1, timeout=3)
        assert "standby" in rig.process.log
    finally:
        await client.close()
        standby.stop()


async def test_active_when_stopped_beyond_its_lease_then_gives_way(rig, bad):
    address = f"127.0.0.1:{free_port()}"
    standby = rig.replica("standby", address, f"127.0.0.1:{free_port()}")
    client = WeightSyncClient(address)
    try:
        await rig.client.register_server(bad.url)
        await rig.until(bad.url, SERVING, 0)
        rig.process.send_signal(signal.SIGSTOP)
        standby.start()
        await client.wait_for("the standby", lambda s: s.confirmed_servers == 1, timeout=20)
        rig.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(10):
            while "LeaseTaken" not in rig.process.log or '"stopped"' not in rig.process.log:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await client.status()).confirmed_servers == 1
    finally:
        await client.close()
        standby.stop()


async def test_calls_when_input_is_bad_then_one_clear_line(rig, bad):
    with pytest.raises(InvalidInput, match="expected http://host:port"):
        await rig.client.register_server("ftp://x")
    with pytest.raises(InvalidInput, match="without a path"):
        await rig.client.register_server("http://127.0.0.1:1/v1")
    with pytest.raises(NotFound, match=r"'10\.0\.0\.1:1'"):
        await rig.client.drain_server("10.0.0.1:1", deadline=1)
    await rig.publish(2, incarnation=5)
    assert await rig.client.publish_version(rig.make_version(3, 5)) == 3
    with pytest.raises(WrongStep, match="current version is 3"):
        await rig.client.publish_version(rig.make_version(1, 5))
    with pytest.raises(StaleIncarnation, match="incarnation 5"):
        await rig.client.publish_version(rig.make_version(4, 4))
    await rig.client.register_server(bad.url)
    server = await rig.until(bad.url, SERVING, 3)
    await rig.client.drain_server(server.server_id, deadline=1)
    await rig.until(bad.url, None)
