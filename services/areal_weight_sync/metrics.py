"""Prometheus metrics of the weight-sync service."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from areal.chassis.waits import Wait
from areal.weights.servers import ServerState
from areal_weight_sync.engine.base import Fault

if TYPE_CHECKING:
    from areal_weight_sync.coordinator import Coordinator


class WeightSyncMetrics(Collector):
    """Counts updates and failures; reads the rest from the coordinator when scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.coordinator: Coordinator | None = None
        self._seconds = Histogram(
            "areal_weight_sync_update_seconds",
            "Time to update a serving server, from pausing its requests to continuing them.",
            registry=registry,
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
        )
        self._failures = Counter(
            "areal_weight_sync_quarantines",
            "How often servers were quarantined, by kind of fault.",
            ["fault"],
            registry=registry,
        )
        registry.register(self)

    def updated(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def failed(self, fault: Fault) -> None:
        self._failures.labels(fault.value).inc()

    def waits(self) -> Iterator[Wait]:
        """Yields the servers that do not serve the current version, for the watchdog."""
        if self.coordinator is None:
            return
        current = self.coordinator.status().current
        for server in self.coordinator.servers():
            since, detail = server.since, f"{server.state}: {server.cause}".rstrip(": ")
            if server.state is ServerState.SERVING:
                if current is None or server.version == current.version:
                    continue
                since = max(since, current.publish_time)
                detail = f"version {current.version}; it still has {server.version}"
            yield Wait("server", server.url, max(0.0, time.time() - since), detail)

    def collect(self) -> Iterable[Metric]:
        if self.coordinator is None:
            return
        servers = GaugeMetricFamily(
            "areal_weight_sync_servers", "Known inference servers by state.", labels=["state"]
        )
        for state, number in self.coordinator.states().items():
            servers.add_metric([state.value], number)
        yield servers
        status = self.coordinator.status()
        yield GaugeMetricFamily(
            "areal_weight_sync_current_version",
            "Current policy version; -1 before the first version.",
            value=status.current_version,
        )
        yield GaugeMetricFamily(
            "areal_weight_sync_confirmed_version",
            "Highest policy version that a server has confirmed; -1 if none has.",
            value=status.confirmed_version,
        )
        yield GaugeMetricFamily(
            "areal_weight_sync_aborted_requests",
            "Requests that weight updates have aborted in this trial.",
            value=status.aborted_requests,
        )
