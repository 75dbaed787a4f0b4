"""Wires the service: Redis, NATS, HTTP and gRPC around the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp

from areal.chassis.logging import get_logger
from areal.chassis.service import Registration, Service, ServiceContext, split_address
from areal.clients.stores import connect_redis
from areal.config.experiment import GRPOConfig
from areal.config.services import in_object_store
from areal.errors import ConfigError
from areal.v1 import weight_sync_service_pb2 as pb
from areal.v1 import weight_sync_service_pb2_grpc as pb_grpc
from areal.weights.manifest import PolicyVersion
from areal_weight_sync.announcer import Announcer
from areal_weight_sync.config import WeightSyncSettings, settings
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.discovery.base import Discovery, Source, make_sources
from areal_weight_sync.engine.base import Engine
from areal_weight_sync.engine.http import HttpEngine, open_session
from areal_weight_sync.metrics import Metrics
from areal_weight_sync.servicer import WeightSyncServicer
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.redis import RedisStore
from areal_weight_sync.store.weights import WeightStore


class WeightSync(Service):
    """The process; see `chassis.Service`."""

    def __init__(self, settings: WeightSyncSettings, context: ServiceContext) -> None:
        self._settings = settings
        self._context = context
        self._servicer = WeightSyncServicer()
        self._log = get_logger("areal.weight_sync")
        self._redis = connect_redis(settings.redis, password=context.security.redis_password)
        self._store = RedisStore(
            self._redis, settings.namespace, settings.lease_ttl_s, context.waits
        )
        self._announcer = Announcer(settings.nats, settings.namespace, context.security.nats_token)
        self._metrics = Metrics(context.registry)
        context.waits.watch(self._metrics.waits)
        self._coordinator: Coordinator | None = None
        self._session: aiohttp.ClientSession | None = None
        self._sources: list[Source] = make_sources(settings.servers)
        self._weights = StoreApp(
            WeightStore(settings.weights_root.resolve(), settings.model_path),
            self._coordinator_versions,
            lambda: self._coordinator.base if self._coordinator else None,
            context.security,
        )

    def registrations(self) -> Sequence[Registration]:
        name = pb.DESCRIPTOR.services_by_name["WeightSyncService"].full_name
        return [
            (
                name,
                lambda server: pb_grpc.add_WeightSyncServiceServicer_to_server(
                    self._servicer, server
                ),
            )
        ]

    async def start(self) -> None:
        """Becomes the active coordinator, then takes over what Redis remembers."""
        settings = self._settings
        spawn, keep = self._context.background.spawn, self._context.background.keep
        self._session = open_session(self._context.security.headers())
        with self._context.waits.on("lease", "the active coordinator, or redis"):
            await self._store.acquire()
        keep(self._store.keep_lease(), "lease")
        if settings.store:
            host, _ = split_address(self._context.listen, "--listen")
            _, port = split_address(urlsplit(settings.store).netloc, "endpoints.weight_store")
            spawn(self._weights.listen(host, port), "weight-store")
        snapshot = await self._store.load()
        coordinator = Coordinator(
            settings.coordinator,
            self._store,
            self._engine,
            spawn,
            keep,
            observer=self._metrics,
            weights_root=settings.weights_root,
            objects=settings.objects,
            keep_versions=settings.keep_versions,
        )
        coordinator.start(snapshot)
        self._coordinator = self._metrics.coordinator = coordinator
        if snapshot.current is None:
            await self._publish_model(coordinator)
        discovery = Discovery(coordinator, self._sources)
        for source in self._sources:
            begin = spawn if source.lists_once else keep
            begin(discovery.follow(source), f"discovery-{source.name}")
            if (company := source.accompany(coordinator)) is not None:
                keep(company, f"accompany-{source.name}")
        keep(self._store.persist(coordinator), "persist")
        if settings.nats:
            keep(self._announcer.run(coordinator), "announcer")
        else:
            self._log.info("announcements_off", reason="endpoints.nats is empty")
        self._servicer.coordinator = coordinator

    def _coordinator_versions(self) -> list[PolicyVersion]:
        """Versions that may lie outside of the store's own folder."""
        if self._coordinator is None:
            return []
        known = (self._coordinator.target, self._coordinator.base)
        return [v for v in known if v is not None and v.stored and not in_object_store(v.path)]

    async def _publish_model(self, coordinator: Coordinator) -> None:
        """The configured model is version 0."""
        path = self._settings.model_path
        if not path.is_dir():
            raise ConfigError(f"model.path {str(path)!r}: expected a model directory")
        await coordinator.publish(PolicyVersion(version=0, incarnation=0, path=str(path.resolve())))
        self._log.info("initial_version", path=str(path.resolve()))

    def _engine(self, url: str) -> Engine:
        config = self._settings.coordinator
        assert self._session is not None  # opened by start, before any server is known
        return HttpEngine(
            url,
            self._session,
            control_timeout=config.control_timeout_s,
            routes=self._settings.routes,
        )

    async def drain(self) -> None:
        """Leaves no server paused and lets a standby take over."""
        if self._coordinator is not None:
            await self._coordinator.stop()
        await self._store.release()

    async def close(self) -> None:
        for source in self._sources:
            await source.close()
        await self._weights.close()
        await self._announcer.close()
        await self._redis.aclose()
        if self._session is not None:
            await self._session.close()


def build(config: GRPOConfig, context: ServiceContext) -> WeightSync:
    """The service of an experiment file."""
    return WeightSync(settings(config), context)
