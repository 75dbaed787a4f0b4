"""Where inference servers come and go: a nameserver, the Kubernetes API, and registration by RPC.

A real nameserver over UDP, the Kubernetes API over real HTTP; behind them the real coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.dns_server import DnsServer
from tests.kubernetes_endpoints import FakeKubernetes
from tests.unit.areal_weight_sync.weight_sync_fakes import FakeEngine, FakeStore, make_model
from tests.waiting import until

from areal.config.server_sources import parse_source
from areal.weights.manifest import PolicyVersion
from areal.weights.servers import ServerState
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.discovery.base import Discovery, Source
from areal_weight_sync.discovery.dns import DnsSource
from areal_weight_sync.discovery.sources import make_sources
from areal_weight_sync.interfaces import Snapshot
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
        config = WeightSyncConfig(
            probe_interval_s=0.02, backoff_s=0.02, backoff_max_s=0.05, update_timeout_s=0.5
        )
        coordinator = Coordinator(config, FakeStore(), self._engine, self._spawn, self._spawn)
        self.coordinator = self.world.coordinator = coordinator
        coordinator.start(Snapshot(records=list(records)))
        await coordinator.publish(PolicyVersion(0, 0, str(self.model)))
        self.sources = self.world.sources()
        self.discovery = Discovery(coordinator, self.sources)
        self.discovery.start(self._spawn, self._spawn)

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

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await until(condition, what, state=self.coordinator.servers)

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
