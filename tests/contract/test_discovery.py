"""Every way in which weight-sync learns of inference servers, held to the same promises.

A real nameserver over UDP, the Kubernetes API over real HTTP, and registration by RPC; behind
them the real coordinator. Static entries never change, and are tested where that matters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.dns_server import DnsServer
from tests.kubernetes_api import FakeKubernetes
from tests.unit.areal_weight_sync.weight_sync_fakes import FakeEngine, FakeStore, make_model

from areal.errors import ConfigError, NotFound
from areal.server_sources import parse_source
from areal.servers import ServerState
from areal.weights import PolicyVersion
from areal_weight_sync.config import CoordinatorConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.discovery import Discovery, Source, make_sources
from areal_weight_sync.discovery_dns import DnsSource
from areal_weight_sync.engine import EngineError, Fault
from areal_weight_sync.ports import Snapshot
from areal_weight_sync.server_state import ServerRecord

SERVING, QUARANTINED = ServerState.SERVING, ServerState.QUARANTINED
PORT = 30000
CONDITION = "areal.io/weights-current"


class World:
    """Where servers come and go; the base is the one without a source: registration by RPC."""

    discovers = False
    entry = ""

    async def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coordinator: Coordinator

    async def stop(self) -> None:
        pass

    def sources(self) -> list[Source]:
        return []

    def add(self, address: str) -> None:
        self.coordinator.register(f"{address}:{PORT}", f"http://{address}:{PORT}")

    def remove(self, address: str) -> None:
        self.coordinator.drain(f"{address}:{PORT}", 0.05)

    def outage(self) -> None:
        pass

    def heal(self) -> None:
        pass


class DnsWorld(World):
    discovers = True

    async def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = DnsServer("sglang.test")
        await self.server.start()
        self.entry = f"dns://{self.server.address}/sglang.test:{PORT}"

    async def stop(self) -> None:
        self.server.stop()

    def sources(self) -> list[Source]:
        return [DnsSource(parse_source(self.entry), min_s=0.05, max_s=0.05)]

    def add(self, address: str) -> None:
        self.server.addresses.append(address)

    def remove(self, address: str) -> None:
        self.server.addresses.remove(address)

    def outage(self) -> None:
        self.server.mode = "servfail"

    def heal(self) -> None:
        self.server.mode = "good"


class KubernetesWorld(World):
    discovers = True
    group_version = "v1"

    async def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = FakeKubernetes("sglang", group_version=self.group_version)
        await self.api.start()
        file = self.api.write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(file))
        # The package reads the variable when it is imported, which another test may have done.
        monkeypatch.setattr(
            "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file)
        )
        self.entry = "kubernetes:///sglang"

    async def stop(self) -> None:
        await self.api.stop()

    def sources(self) -> list[Source]:
        return make_sources([self.entry])

    def add(self, address: str) -> None:
        self.api.add(address)

    def remove(self, address: str) -> None:
        self.api.remove(address)

    def outage(self) -> None:
        self.api.mode = "500"
        self.api.cut()

    def heal(self) -> None:
        self.api.mode = "good"


class OlderKubernetesWorld(KubernetesWorld):
    group_version = "v1beta1"


WORLDS = {
    "registration": World,
    "dns": DnsWorld,
    "kubernetes": KubernetesWorld,
    "kubernetes-v1beta1": OlderKubernetesWorld,
}


class Stack:
    """A world, and a coordinator that follows it."""

    def __init__(self, world: World, tmp_path: Path) -> None:
        self.world = world
        self.engines: dict[str, FakeEngine] = {}
        self.model = make_model(tmp_path / "model")
        self.sources: list[Source] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *records: ServerRecord) -> None:
        config = CoordinatorConfig(
            probe_interval_s=0.02, backoff_s=0.02, backoff_max_s=0.05, update_timeout_s=0.5
        )
        coordinator = Coordinator(config, FakeStore(), self._engine, self._spawn)
        self.coordinator = self.world.coordinator = coordinator
        coordinator.start(Snapshot(records=list(records)))
        await coordinator.publish(PolicyVersion(0, 0, str(self.model)))
        self.sources = self.world.sources()
        self.discovery = Discovery(coordinator, self.sources)
        for source in self.sources:
            self._spawn(self.discovery.follow(source), "follow")
            self._spawn(source.accompany(coordinator), "accompany")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self.sources:
            await source.close()
        failures = [e for e in ended if isinstance(e, Exception)]
        assert not failures, failures

    def _engine(self, url: str) -> FakeEngine:
        return self.engines.setdefault(url, FakeEngine())

    def engine(self, address: str) -> FakeEngine:
        return self._engine(f"http://{address}:{PORT}")

    def _spawn(self, coroutine, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.append(task)
        return task

    def serving(self) -> set[str]:
        servers = self.coordinator.servers()
        return {s.server_id.rpartition(":")[0] for s in servers if s.state is SERVING}

    async def until(self, condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.coordinator.servers()}"
            await asyncio.sleep(0.01)

    async def until_serving(self, *addresses: str) -> None:
        await self.until(lambda: self.serving() == set(addresses), f"serving {addresses}")


@asynccontextmanager
async def running(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    await world.start(tmp_path, monkeypatch)
    stack = Stack(world, tmp_path)
    try:
        yield stack
    finally:
        await stack.stop()
        await world.stop()


@pytest.fixture(params=WORLDS)
async def stack(request, tmp_path, monkeypatch) -> AsyncIterator[Stack]:
    async with running(WORLDS[request.param](), tmp_path, monkeypatch) as stack:
        yield stack


@pytest.fixture(params=[name for name, world in WORLDS.items() if world.discovers])
async def discovering(request, tmp_path, monkeypatch) -> AsyncIterator[Stack]:
    async with running(WORLDS[request.param](), tmp_path, monkeypatch) as stack:
        yield stack


@pytest.fixture
async def kube(tmp_path, monkeypatch) -> AsyncIterator[Stack]:
    async with running(KubernetesWorld(), tmp_path, monkeypatch) as stack:
        yield stack


# ── all sources ─────────────────────────────────────────────────────────────────────────────────


async def test_newcomer_when_it_appears_then_it_serves_the_current_version(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1")
    stack.world.add("10.0.0.2")
    await stack.until_serving("10.0.0.1", "10.0.0.2")
    assert all(engine.version == "0" for engine in stack.engines.values())


async def test_leaver_when_it_vanishes_then_it_drains_and_is_forgotten(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    stack.world.add("10.0.0.2")
    await stack.until_serving("10.0.0.1", "10.0.0.2")
    leaver = stack.engine("10.0.0.2")
    leaver.requests = 3
    stack.world.remove("10.0.0.2")
    await stack.until_serving("10.0.0.1")
    await stack.until(lambda: len(stack.coordinator.servers()) == 1, "forgotten")
    assert leaver.aborts == 3  # with their partial tokens; they go on elsewhere


async def test_server_when_it_comes_back_then_it_serves_again(stack):
    await stack.start()
    for _ in range(2):
        stack.world.add("10.0.0.1")
        await stack.until_serving("10.0.0.1")
        stack.world.remove("10.0.0.1")
        await stack.until(lambda: not stack.coordinator.servers(), "forgotten")


async def test_source_when_it_is_away_then_its_servers_stay(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1")
    stack.world.outage()
    await asyncio.sleep(0.5)
    assert stack.serving() == {"10.0.0.1"}
    stack.world.heal()
    stack.world.add("10.0.0.2")
    await stack.until_serving("10.0.0.1", "10.0.0.2")


async def test_server_of_an_rpc_when_a_source_lists_others_then_it_stays(stack):
    await stack.start()
    stack.coordinator.register("10.0.9.9:1", "http://10.0.9.9:1")
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1", "10.0.9.9")
    stack.world.remove("10.0.0.1")
    await stack.until_serving("10.0.9.9")


async def test_discovered_server_when_it_registers_too_then_it_still_leaves_with_its_source(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1")
    stack.coordinator.register(f"10.0.0.1:{PORT}", f"http://10.0.0.1:{PORT}")
    assert stack.serving() == {"10.0.0.1"}
    stack.world.remove("10.0.0.1")
    await stack.until(lambda: not stack.coordinator.servers(), "forgotten")


async def test_server_that_vanished_when_nobody_watched_then_it_is_forgotten(discovering):
    origin = discovering.world.entry
    discovering.engine("10.0.0.7").down = EngineError(Fault.UNREACHABLE, "cannot connect")
    await discovering.start(ServerRecord(f"10.0.0.7:{PORT}", f"http://10.0.0.7:{PORT}", origin))
    discovering.world.add("10.0.0.1")
    await discovering.until_serving("10.0.0.1")
    await discovering.until(lambda: len(discovering.coordinator.servers()) == 1, "forgotten")


async def test_server_drained_by_hand_when_still_listed_then_it_stays_out(discovering):
    await discovering.start()
    discovering.world.add("10.0.0.1")
    discovering.world.add("10.0.0.2")
    await discovering.until_serving("10.0.0.1", "10.0.0.2")
    discovering.coordinator.drain(f"10.0.0.2:{PORT}", 0.0)
    await discovering.until_serving("10.0.0.1")
    discovering.world.add("10.0.0.3")
    await discovering.until_serving("10.0.0.1", "10.0.0.3")
    discovering.world.remove("10.0.0.2")
    await asyncio.sleep(0.2)
    discovering.world.add("10.0.0.2")
    await discovering.until_serving("10.0.0.1", "10.0.0.2", "10.0.0.3")


# ── DNS ─────────────────────────────────────────────────────────────────────────────────────────


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
    assert len(await asyncio.wait_for(flicker, 10)) == 1
    await listings.aclose()


async def test_dns_when_the_time_to_live_is_long_then_it_is_asked_again_soon(nameserver):
    nameserver.ttl, nameserver.addresses = 600, ["10.0.0.1"]
    entry = parse_source(f"dns://{nameserver.address}/sglang.test:{PORT}")
    listings = DnsSource(entry, min_s=0.01, max_s=0.05).watch()
    await anext(listings)
    nameserver.addresses.append("10.0.0.2")
    assert len(await asyncio.wait_for(anext(listings), 10)) == 2
    await listings.aclose()


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────


def condition(stack: Stack, address: str) -> str:
    conditions = stack.world.api.pods["pod-" + address.replace(".", "-")]
    return conditions.get(CONDITION, {}).get("status", "")


async def test_readiness_when_weights_are_current_then_true_and_when_quarantined_then_false(kube):
    kube.engine("10.0.0.1").down = EngineError(Fault.UNREACHABLE, "cannot connect")
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until(lambda: condition(kube, "10.0.0.1") == "False", "not up yet: not ready")
    kube.engine("10.0.0.1").down = None
    await kube.until(lambda: condition(kube, "10.0.0.1") == "True", "serving: ready")
    kube.engine("10.0.0.1").down = EngineError(Fault.HTTP_STATUS, "HTTP 500: CUDA error")
    await kube.until(lambda: condition(kube, "10.0.0.1") == "False", "quarantined: not ready")
    said = kube.world.api.pods["pod-10-0-0-1"][CONDITION]
    assert said["reason"] == "Quarantined"
    assert "CUDA error" in said["message"]


async def test_readiness_when_another_pod_takes_the_address_then_it_is_told_too(kube):
    await kube.start()
    kube.world.api.add("10.0.0.1", "pod-a")
    await kube.until(lambda: CONDITION in kube.world.api.pods["pod-a"], "first pod")
    kube.world.api.add("10.0.0.1", "pod-b")
    await kube.until(lambda: CONDITION in kube.world.api.pods["pod-b"], "second pod")
    assert kube.world.api.pods["pod-b"][CONDITION]["status"] == "True"


async def test_readiness_when_the_api_refuses_for_a_while_then_it_is_said_later(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    await kube.until(lambda: condition(kube, "10.0.0.1") == "True", "ready")
    kube.world.api.mode = "403"
    kube.engine("10.0.0.1").down = EngineError(Fault.HTTP_STATUS, "HTTP 500")
    await kube.until(lambda: not kube.serving(), "quarantined")
    await asyncio.sleep(0.3)
    assert condition(kube, "10.0.0.1") == "True"
    kube.world.api.mode = "good"
    await kube.until(lambda: condition(kube, "10.0.0.1") == "False", "said at last")


async def test_endpoint_when_it_terminates_then_it_drains_before_it_vanishes(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    kube.world.add("10.0.0.2")
    await kube.until_serving("10.0.0.1", "10.0.0.2")
    kube.world.api.terminate("10.0.0.2")
    await kube.until_serving("10.0.0.1")


async def test_watch_when_the_server_ends_it_then_it_goes_on_without_a_list(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    api = kube.world.api
    api.bookmark()
    watches, lists = api.watches, api.lists
    api.cut()
    await kube.until(lambda: api.watches > watches, "watched again")
    kube.world.add("10.0.0.2")
    await kube.until_serving("10.0.0.1", "10.0.0.2")
    assert api.lists == lists


async def test_watch_when_its_version_is_gone_then_it_lists_again(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    api = kube.world.api
    lists = api.lists
    api.compact()
    await kube.until(lambda: api.lists > lists, "listed again")
    kube.world.add("10.0.0.2")
    await kube.until_serving("10.0.0.1", "10.0.0.2")


async def test_slice_when_it_is_deleted_then_its_servers_leave(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    kube.world.api.delete_slice()
    await kube.until(lambda: not kube.coordinator.servers(), "forgotten")
    assert set(kube.world.api.selectors) == {"kubernetes.io/service-name=sglang"}


# ── entries ─────────────────────────────────────────────────────────────────────────────────────


async def test_static_entries_when_one_is_taken_out_then_its_server_is_forgotten(tmp_path):
    class Static(World):
        def sources(self) -> list[Source]:
            return make_sources(["http://10.0.0.1:30000", "http://10.0.0.2:30000"])

    stack = Stack(Static(), tmp_path)
    gone = ServerRecord("10.0.0.3:30000", "http://10.0.0.3:30000", "http://10.0.0.3:30000")
    await stack.start(gone)
    await stack.until_serving("10.0.0.1", "10.0.0.2")
    await stack.until(lambda: len(stack.coordinator.servers()) == 2, "forgotten")
    with pytest.raises(NotFound):
        stack.coordinator.drain("10.0.0.3:30000", 0.0)
    await stack.stop()


@pytest.mark.parametrize(
    "entry",
    [
        "sglang:30000",
        "ftp://sglang:30000",
        "http://",
        "http://host:port",
        "http://host:1/path",
        "dns://sglang",
        "dns://sglang:0",
        "dns://sglang:70000",
        "dns:///sglang:30000",
        "dns://bad name:1",
        "kubernetes://sglang",
        "kubernetes://ns/SGLANG",
        "kubernetes://ns/sglang:0",
        "kubernetes://n.s/sglang",
    ],
)
def test_entry_when_malformed_then_one_line_names_it(entry):
    with pytest.raises(ConfigError, match=r"endpoints\.inference .*expected") as caught:
        parse_source(entry)
    assert repr(entry) in str(caught.value)


def test_entry_when_its_nameserver_is_no_address_then_one_line_names_it():
    with pytest.raises(ConfigError, match="expected an IPv4 address of a nameserver"):
        make_sources(["dns://resolver.local/sglang:30000"])
