"""What weight-sync depends on dies, or it dies itself: its stores, its replica, its process."""

from __future__ import annotations

import asyncio
import json
import signal

import nats
import pytest
from tests.integration.weight_sync_rig import free_port, generate_info

from areal.clients.weight_sync import WeightSyncClient
from areal.errors import WaitTimeout
from areal.weights.servers import ServerState

pytestmark = pytest.mark.timeout(300)
SERVING, QUARANTINED = ServerState.SERVING, ServerState.QUARANTINED


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


async def test_inference_when_killed_then_noticed_and_rejoins_at_the_current_version(rig, good):
    process, url = good
    await rig.until(url, SERVING, 0)
    await rig.publish(1)
    await rig.until(url, SERVING, 1)
    process.kill()
    await rig.until(url, QUARANTINED, cause="cannot connect")
    process.start()  # the same command: version "default", the weights of version 0
    await rig.until(url, SERVING, 1)
    assert (await generate_info(url))["weight_version"] == "1"


async def test_redis_when_lost_for_a_while_then_nothing_is_lost(rig, good, redis):
    _, url = good
    await rig.until(url, SERVING, 0)
    redis.kill()
    publishing = asyncio.create_task(rig.client.publish_version(rig.make_version(1)))
    await asyncio.sleep(4)  # longer than the lease
    assert (await rig.server(url)).state is SERVING
    assert not publishing.done()
    redis.start()
    assert await publishing == 1
    await rig.until(url, SERVING, 1)


@pytest.mark.parametrize("nats_server", ["deployed"], indirect=True)
async def test_nats_when_lost_then_versions_go_on_and_announcements_resume(rig, bad, nats_server):
    await rig.client.register_server(bad.url)
    await rig.until(bad.url, SERVING, 0)
    nats_server.kill()
    await rig.publish(1)
    await rig.until(bad.url, SERVING, 1)
    nats_server.start()
    connection = await nats.connect(nats_server.url)
    subject = "areal." + rig.namespace.replace("/", ".") + ".versions"
    async with asyncio.timeout(60):
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
            "the standby", lambda s: s.confirmed_servers == 1, timeout=60
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
        await client.wait_for("the standby", lambda s: s.confirmed_servers == 1, timeout=60)
        rig.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(60):
            while "LeaseTaken" not in rig.process.log or '"stopped"' not in rig.process.log:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await client.status()).confirmed_servers == 1
    finally:
        await client.close()
        standby.stop()
