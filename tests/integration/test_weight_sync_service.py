"""The service as users run it: its own process, real Redis, NATS, gRPC, and inference servers."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import aiohttp
import nats
import pytest
from tests.integration.weight_sync_rig import BadServer, WeightSyncRig, generate, inference

from areal.errors import InvalidInput, NotFound, StaleIncarnation, WrongStep
from areal.weights.servers import ServerState

pytestmark = pytest.mark.timeout(300)
SERVING, QUARANTINED = ServerState.SERVING, ServerState.QUARANTINED


async def test_updates_when_requests_run_then_none_is_aborted_and_tokens_carry_versions(
    rig, tmp_path, tiny_model, good, nats_server, capsys
):
    second, second_url = inference(tmp_path, tiny_model, "inference-2")
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
        async with asyncio.timeout(60):
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
        await rig.client.publish_version(prepared)
        # Half of what an update may take: the good one does not wait for the bad ones.
        await rig.until(url, SERVING, 1, timeout=60)
        for mode, server in bad.items():
            await rig.until(server.url, QUARANTINED, timeout=60, cause=CAUSES[mode])
            server.mode = "good"
            server.stop_hanging.set()
        for server in bad.values():
            await rig.until(server.url, SERVING, 1, timeout=90)
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
    await rig.until(bad.url, QUARANTINED, cause=CAUSES["stale"])


@pytest.mark.parametrize("mode", ["retract", pytest.param("abort", marks=pytest.mark.long)])
async def test_interrupt_when_not_in_place_then_requests_are_recomputed_or_aborted(
    tmp_path, redis, nats_server, tiny_model, mode
):
    process, url = inference(tmp_path, tiny_model, "inference")
    rig = WeightSyncRig(
        tmp_path, redis.url, nats_server.url, tiny_model, servers=(url,), interrupt=mode
    )
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
