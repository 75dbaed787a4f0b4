"""What only DNS has: both families of addresses, answers that miss records, times to live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.contract.discovery_worlds import PORT
from tests.dns_server import DnsServer

from areal.config.server_sources import parse_source
from areal_weight_sync.discovery.dns import DnsSource
from areal_weight_sync.discovery.sources import make_sources


@pytest.fixture
async def nameserver() -> AsyncIterator[DnsServer]:
    server = DnsServer("sglang.test")
    await server.start()
    yield server
    server.stop()


async def test_dns_when_a_name_has_both_families_then_each_address_is_a_server(nameserver):
    nameserver.addresses = ["10.0.0.1", "fd00::2"]
    source = make_sources([f"dns://{nameserver.address}/sglang.test:{PORT}"])[0]
    listing = await anext(source.watch())
    assert {f.url for f in listing.values()} == {"http://10.0.0.1:30000", "http://[fd00::2]:30000"}


async def test_dns_when_one_answer_misses_a_record_then_the_server_stays(nameserver):
    nameserver.addresses = ["10.0.0.1", "10.0.0.2"]
    entry = parse_source(f"dns://{nameserver.address}/sglang.test:{PORT}")
    listings = DnsSource(entry, min_s=0.0, max_s=0.0).watch()
    assert len(await anext(listings)) == 2
    nameserver.partial = True
    flicker = asyncio.create_task(anext(listings))
    asked = nameserver.asked
    for _ in range(1000):
        if nameserver.asked >= asked + 12:
            break
        await asyncio.sleep(0.01)
    assert nameserver.asked >= asked + 12
    assert not flicker.done()
    nameserver.partial, nameserver.addresses = False, ["10.0.0.1"]
    assert len(await asyncio.wait_for(flicker, 60)) == 1
    await listings.aclose()


async def test_dns_when_the_time_to_live_is_long_then_it_is_asked_again_soon(nameserver):
    nameserver.ttl, nameserver.addresses = 600, ["10.0.0.1"]
    entry = parse_source(f"dns://{nameserver.address}/sglang.test:{PORT}")
    listings = DnsSource(entry, min_s=0.01, max_s=0.05).watch()
    await anext(listings)
    nameserver.addresses.append("10.0.0.2")
    assert len(await asyncio.wait_for(anext(listings), 60)) == 2
    await listings.aclose()
