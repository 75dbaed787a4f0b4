"""What the gateway counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class GatewayMetrics:
    """All metrics of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "areal_gateway_requests",
            "Answered HTTP requests by route and status code.",
            ["route", "code"],
            registry=registry,
        )
        self.streams = Gauge(
            "areal_gateway_event_streams", "Open event streams.", registry=registry
        )
