"""Wires weight-sync: Redis, NATS, inference servers and the weight store around the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from areal.chassis.service import (
    Registration,
    Server,
    ServiceContext,
    run_service,
    split_address,
)
from areal.clients.redis_connection import connect_redis
from areal.v1.weight_sync_service_pb2_grpc import add_WeightSyncServiceServicer_to_server
from areal_weight_sync.announcer import Announcer
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.discovery.base import Discovery
from areal_weight_sync.discovery.sources import make_sources
from areal_weight_sync.engine.givers import Givers
from areal_weight_sync.engine.http import HttpEngine, open_session
from areal_weight_sync.metrics import WeightSyncMetrics
from areal_weight_sync.servicer import WeightSyncService
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.redis import RedisStore
from areal_weight_sync.store.weights import WeightStore


class WeightSyncServer(Server):
    """The process of the active coordinator, or of one that stands by."""

    def __init__(self, config: WeightSyncConfig, context: ServiceContext) -> None:
        self._config, self._context, security = config, context, context.security
        own = context.own
        self._service = WeightSyncService()
        redis = connect_redis(config.redis, password=security.redis_password)
        context.closing.push_async_callback(redis.aclose)
        self._store = RedisStore(redis, config.namespace, config.lease_ttl_s, context.waits)
        self._announcer = own(Announcer(config.nats, config.namespace, security.nats_token))
        self._session = own(open_session(security.headers(), security.previous_headers()))
        self._metrics = WeightSyncMetrics(context.registry)
        context.waits.watch(self._metrics.waits)
        self._coordinator: Coordinator | None = None
        self._sources = [own(source) for source in make_sources(config.endpoints)]
        assert config.weights_root is not None, "from_experiment sets it"
        self._weights = StoreApp(
            WeightStore(config.weights_root.resolve(), config.model_path),
            lambda: self._coordinator.elsewhere() if self._coordinator else [],
            lambda: self._coordinator.base if self._coordinator else None,
            security,
        )
        own(self._weights)

    def registrations(self) -> Sequence[Registration]:
        add = partial(add_WeightSyncServiceServicer_to_server, self._service)
        return [("areal.v1.WeightSyncService", add)]

    async def start(self) -> None:
        """Becomes the active coordinator, then takes over what Redis remembers."""
        config, context = self._config, self._context
        spawn, keep = context.background.spawn, context.background.keep
        with context.waits.on("lease", "the active coordinator, or redis"):
            await self._store.acquire()
        keep(self._store.keep_lease(), "lease")
        if store := config.routes.store:
            host, _ = split_address(context.listen, "--listen")
            _, port = split_address(urlsplit(store).netloc, "endpoints.weight_store")
            spawn(self._weights.listen(host, port), "weight-store")
        connect = partial(
            HttpEngine,
            session=self._session,
            control_timeout=config.control_timeout_s,
            routes=config.routes,
            givers=Givers(),
        )
        coordinator = Coordinator(config, self._store, connect, spawn, keep, self._metrics)
        snapshot = await self._store.load()
        coordinator.start(snapshot)
        self._coordinator = self._metrics.coordinator = coordinator
        if snapshot.current is None:
            await coordinator.publish_model(config.model_path)
        Discovery(coordinator, self._sources).start(spawn, keep)
        keep(self._store.persist(coordinator), "persist")
        self._announcer.start(coordinator, keep)
        self._service.coordinator = coordinator

    async def drain(self) -> None:
        """Leaves no server paused and lets a standby take over."""
        if self._coordinator is not None:
            await self._coordinator.stop()
        await self._store.release()


def main() -> None:
    """Serves until told to stop."""
    run_service("weight-sync", WeightSyncConfig.from_experiment, WeightSyncServer)
