"""A coordinator over fake engines."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from tests.unit.areal_weight_sync.weight_sync_fakes import (
    FakeEngine,
    FakeStore,
    make_model,
    publish_folder,
)

from areal.chassis import endless
from areal.weights.manifest import PolicyVersion
from areal.weights.servers import ServerState
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.engine.base import Fault

JOINING, SYNCING, SERVING = ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING
QUARANTINED = ServerState.QUARANTINED


class Failures:
    """An observer that remembers quarantines."""

    def __init__(self) -> None:
        self.failures: list[Fault] = []

    def updated(self, seconds: float) -> None:
        pass

    def failed(self, fault: Fault) -> None:
        self.failures.append(fault)


class Rig:
    """A coordinator over fake engines, named a, b, c…"""

    def __init__(self, tmp_path: Path, **config) -> None:
        self.root = tmp_path / "weights"
        self.root.mkdir()
        self.model = make_model(tmp_path / "model")
        self.engines: dict[str, FakeEngine] = {}
        self.tasks: list[asyncio.Task] = []
        self.ended: list[BaseException] = []  # of loops that should have run on
        values = {
            "probe_interval_s": 0.02,
            "backoff_s": 0.02,
            "backoff_max_s": 0.05,
            "update_timeout_s": 0.5,
            "serving_grace_s": 0.1,
            "deep_probe_every": 2,
            "weights_root": self.root,
            "keep_versions": 2,
        }
        self.store = FakeStore()
        self.observer = Failures()
        self.coordinator = Coordinator(
            WeightSyncConfig(**{**values, **config}),
            self.store,
            lambda url: self.engine(url.removeprefix("http://")),
            self._spawn,
            self._keep,
            observer=self.observer,
        )

    def _spawn(self, coroutine, name: str) -> asyncio.Task:
        task = asyncio.create_task(coroutine, name=name)
        self.tasks.append(task)
        return task

    def _keep(self, coroutine, name: str) -> asyncio.Task:
        task = endless.keep(coroutine, name, self.ended.append)
        self.tasks.append(task)
        return task

    def engine(self, name: str) -> FakeEngine:
        return self.engines.setdefault(name, FakeEngine())

    def register(self, *names: str) -> None:
        for name in names:
            self.coordinator.register(name, f"http://{name}")

    async def serving(self, *names: str) -> None:
        """These servers, at version 0."""
        self.register(*names)
        await self.publish_model()
        for name in names:
            await self.at(name, SERVING, 0)

    async def publish_model(self) -> None:
        await self.coordinator.publish(PolicyVersion(0, 0, str(self.model)))

    async def publish(self, version: int, incarnation: int = 1) -> int:
        return await self.coordinator.publish(publish_folder(self.root, version, incarnation))

    def server(self, name: str):
        record = self.coordinator.record(name)
        return None if record is None else record.public()

    async def until(self, condition, what: str, timeout: float = 60.0) -> None:
        feed = self.coordinator.open_feed()
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    await feed.take(0.01)
        except TimeoutError:
            states = self.coordinator.servers()
            raise AssertionError(f"waited {timeout} s for {what}: {states}") from None
        finally:
            self.coordinator.close_feed(feed)

    async def at(self, name: str, state: ServerState, version: int | None = None) -> None:
        await self.until(
            lambda: (
                self.server(name).state is state and version in (None, self.server(name).version)
            ),
            f"{name} {state} at {version}",
        )

    def failed_tasks(self) -> list[BaseException]:
        return [
            t.exception() for t in self.tasks if t.done() and not t.cancelled() and t.exception()
        ]


@asynccontextmanager
async def rig_of(tmp_path: Path, **config):
    rig = Rig(tmp_path, **config)
    try:
        yield rig
    finally:
        await rig.coordinator.stop()
        for task in rig.tasks:
            task.cancel()
        if rig.tasks:
            await asyncio.wait(rig.tasks, timeout=60)
        assert rig.failed_tasks() == rig.ended == []
