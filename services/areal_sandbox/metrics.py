"""What a sandbox service counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class SandboxMetrics:
    """All metrics of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leases = Gauge("areal_sandbox_leases", "Boxes that are leased now.", registry=registry)
        self.warm = Gauge(
            "areal_sandbox_warm", "Started boxes that are ready to be lent.", registry=registry
        )
        self.ended = Counter(
            "areal_sandbox_leases_ended",
            "Leases that ended, by cause: killed, expired, died, drained.",
            ["cause"],
            registry=registry,
        )
        self.commands = Counter(
            "areal_sandbox_commands",
            "Commands that ended, by cause: a limit (time, memory, processes, output, cpu), killed "
            "(with their box), none (they ended on their own).",
            ["cause"],
            registry=registry,
        )
        self.refused = Counter(
            "areal_sandbox_refused",
            "Calls refused because all boxes were taken.",
            registry=registry,
        )
        self.command_seconds = Histogram(
            "areal_sandbox_command_seconds",
            "Wall time of a command.",
            registry=registry,
            buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
