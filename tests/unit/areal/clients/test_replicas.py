"""How a client spreads its calls over the replicas of a service. Over real channels."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from tests.dns_server import DnsServer
from tests.ports import free_port
from tests.waiting import until

from areal.addresses import join_address
from areal.chassis import service
from areal.chassis.addresses import split_host, target_of
from areal.chassis.health import BoundedHealthServicer
from areal.clients.rollout import RolloutClient
from areal.errors import ConfigError, Unavailable
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Replica(pb_grpc.RolloutServiceServicer):
    """One of several; answers at once, except calls of the session "slow"."""

    def __init__(self, place: str) -> None:
        self.address = ""
        self.calls: list[str] = []
        self.release = asyncio.Event()
        self._place = place
        self.health = BoundedHealthServicer([])

    async def CallSession(
        self, request: pb.CallSessionRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.CallSessionResponse]:
        self.calls.append(request.session_id)
        if request.session_id == "slow":
            await self.release.wait()
        yield pb.CallSessionResponse(status=200, body=self.address.encode())

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_RolloutServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        await self.health.set("", SERVING)
        host = self._place.rpartition(":")[0]
        self.address = f"{host}:{self._server.add_insecure_port(self._place)}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)


class Replicas:
    """Those of one test, and its client."""

    def __init__(self) -> None:
        self.all: list[Replica] = []
        self.client: RolloutClient | None = None

    async def add(self, place: str = "127.0.0.1:0") -> Replica:
        self.all.append(Replica(place))
        await self.all[-1].start()
        return self.all[-1]

    async def call(self, session: str = "quick") -> str:
        assert self.client is not None
        request = pb.CallSessionRequest(session_id=session)
        found = [each async for each in self.client.call_session(request, wait_s=30.0)]
        return found[0].body.decode()

    async def answers(self, count: int) -> Counter[str]:
        return Counter([await self.call() for _ in range(count)])

    async def all_answer(self) -> None:
        """Waits until every replica answers in its turn."""
        expected = {each.address for each in self.all}
        await self.come(Counter(dict.fromkeys(expected, 2)))

    async def come(self, expected: Counter[str]) -> None:
        """Waits until as many calls give these answers."""
        found = Counter[str]()
        async with asyncio.timeout(60.0):
            while found != expected:
                await asyncio.sleep(0.01)
                with suppress(Unavailable):
                    found = await self.answers(expected.total())


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    made = Replicas()
    yield made
    if made.client is not None:
        await made.client.close()
    for each in made.all:
        each.release.set()
        await each.stop()


async def test_calls_when_there_are_several_addresses_then_each_replica_gets_as_many(
    replicas: Replicas,
) -> None:
    one, two, three = [await replicas.add() for _ in range(3)]
    replicas.client = RolloutClient(f"{one.address}, {two.address},{three.address}")
    await replicas.all_answer()
    assert await replicas.answers(30) == {each.address: 10 for each in (one, two, three)}


async def test_calls_when_a_name_has_several_addresses_then_each_replica_gets_as_many(
    replicas: Replicas,
) -> None:
    port, names = free_port(), DnsServer("workers.test")
    await names.start()
    names.addresses = ["127.0.0.1", "127.0.0.2"]
    one, two = [await replicas.add(f"{host}:{port}") for host in names.addresses]
    replicas.client = RolloutClient(f"dns://{names.address}/workers.test:{port}")
    await replicas.all_answer()
    assert await replicas.answers(20) == {one.address: 10, two.address: 10}
    names.stop()


async def test_calls_when_a_replica_dies_then_only_its_own_fail_and_none_is_made_twice(
    replicas: Replicas,
) -> None:
    one, two = [await replicas.add() for _ in range(2)]
    replicas.client = RolloutClient(f"{one.address},{two.address}")
    await replicas.all_answer()
    slow = [asyncio.create_task(replicas.call("slow")) for _ in range(4)]
    await until(lambda: one.calls.count("slow") == two.calls.count("slow") == 2, "4 calls", 30.0)
    await one.stop()
    await until(lambda: sum(task.done() for task in slow) == 2, "those of the dead end", 30.0)
    two.release.set()
    ends = await asyncio.gather(*slow, return_exceptions=True)
    assert ends.count(two.address) == 2
    assert sum(isinstance(end, Unavailable) for end in ends) == 2
    assert two.calls.count("slow") == 2, "a call that a replica began is not made again"
    assert await replicas.answers(10) == {two.address: 10}


async def test_calls_when_a_replica_drains_then_new_ones_go_elsewhere_and_its_own_end_well(
    replicas: Replicas,
) -> None:
    one, two = [await replicas.add() for _ in range(2)]
    replicas.client = RolloutClient(f"{one.address},{two.address}")
    await replicas.all_answer()
    slow = [asyncio.create_task(replicas.call("slow")) for _ in range(2)]
    await until(lambda: one.calls.count("slow") == two.calls.count("slow") == 1, "2 calls", 30.0)
    await one.health.set("", NOT_SERVING)
    await replicas.come(Counter({two.address: 6}))
    one.release.set()
    two.release.set()
    assert set(await asyncio.gather(*slow)) == {one.address, two.address}
    await one.health.set("", SERVING)
    await replicas.all_answer()


async def test_replica_when_it_is_added_to_a_name_then_it_gets_calls_without_a_restart(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_CONNECTION_AGE_MS", 300)
    port, names = free_port(), DnsServer("workers.test")
    await names.start()
    names.addresses = ["127.0.0.1"]
    first = Replica(f"127.0.0.1:{port}")
    first.address = f"127.0.0.1:{port}"

    class Ours(service.Server):
        def registrations(self) -> list[service.Registration]:
            return [
                (
                    "areal.v1.RolloutService",
                    lambda server: pb_grpc.add_RolloutServiceServicer_to_server(first, server),
                )
            ]

    context = service.ServiceContext("rollout", first.address, None)
    listeners = await service.listen_in(context, Ours(), "")
    replicas.client = RolloutClient(f"dns://{names.address}/workers.test:{port}")
    assert await replicas.call() == first.address
    second = await replicas.add(f"127.0.0.2:{port}")
    names.addresses.append("127.0.0.2")
    await replicas.come(Counter({first.address: 2, second.address: 2}))
    names.stop()
    await listeners.stop(0)


@given(
    st.lists(
        st.tuples(st.ip_addresses(v=4).map(str), st.integers(0, 65535)), min_size=2, max_size=5
    )
)
def test_target_when_addresses_are_numbers_then_they_are_kept_in_order(
    places: list[tuple[str, int]],
) -> None:
    text = " , ".join(join_address(host, port) for host, port in places)
    assert target_of(text) == (f"ipv4:{text.replace(' ', '')}", join_address(*places[0]))
    assert [split_host(each.strip()) for each in text.split(",")] == places


async def test_calls_when_addresses_are_of_ipv6_then_each_replica_gets_as_many(
    replicas: Replicas,
) -> None:
    try:
        one, two = [await replicas.add("[::1]:0") for _ in range(2)]
    except RuntimeError:
        pytest.skip("this machine has no IPv6")
    replicas.client = RolloutClient(f"{one.address},{two.address}")
    await replicas.all_answer()
    assert await replicas.answers(10) == {one.address: 5, two.address: 5}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1:80,", "'': expected host:port"),
        (",", "'': expected host:port"),
        ("127.0.0.1:80,elsewhere", "'elsewhere': expected host:port"),
        ("127.0.0.1:80,127.0.0.1:x", "'127.0.0.1:x': expected host:port"),
        ("127.0.0.1:80,[::1]:80", "all are of IPv4, or all of IPv6"),
        (f"127.0.0.1:80,{'a' * 70}:80", "all are of IPv4, or all of IPv6"),
        ("127.0.0.1:80,nobody.invalid:80", "all are of IPv4, or all of IPv6"),
    ],
)
def test_target_when_an_address_is_wrong_then_one_line_says_which(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("[", r"\[")) as caught:
        RolloutClient(text)
    assert "\n" not in str(caught.value)
