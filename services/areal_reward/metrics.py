"""What a reward service counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class RewardMetrics:
    """All metrics of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.items = Counter(
            "areal_reward_items",
            "Items by outcome: reward, or a failure (function, timeout, crash, invalid).",
            ["outcome"],
            registry=registry,
        )
        self.waiting = Gauge(
            "areal_reward_waiting_items", "Items accepted but not scored yet.", registry=registry
        )
        self.workers_ended = Counter(
            "areal_reward_workers_ended",
            "Workers replaced, by cause: timeout, crash, memory, abandoned, recipe.",
            ["cause"],
            registry=registry,
        )
        self.batch_seconds = Histogram(
            "areal_reward_batch_seconds",
            "Time from accepting a call's items to its last result.",
            registry=registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )
