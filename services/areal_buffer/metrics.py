"""Prometheus metrics of the ledger. Gauges show the whole run, whichever replica is asked."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from areal.protocol.leases import LedgerStats, Take
from areal_buffer.records import Completion, MemoryGauge, Swept


class BufferMetrics:
    """All metrics of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"areal_buffer_{name}", text, labels, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"areal_buffer_{name}", text, registry=registry)

        self._tasks = gauge("tasks", "Tasks by state.", ("state",))
        self._submitted = gauge("submitted_tasks", "Tasks submitted in this trial.")
        self._version = gauge(
            "policy_version", "Newest policy version that a server has confirmed."
        )
        self._taken = gauge("last_taken_step", "Newest step whose batch was taken.")
        self._committed = gauge("last_committed_step", "Newest step that a checkpoint contains.")
        self._headroom = gauge(
            "admission_headroom_groups", "Groups that may start before admission blocks more."
        )
        self._regenerated = gauge(
            "regenerated_groups", "Groups generated again because they were too stale."
        )
        self._memory = gauge("redis_memory_bytes", "Memory that Redis uses, for all trials.")
        self._held = gauge("held_bytes", "Bytes of tasks that the ledger holds.")
        self._limit = gauge("limit_bytes", "Bytes of tasks that the ledger may hold.")
        self._answered = gauge(
            "redis_answered_timestamp_seconds", "Unix time when Redis last answered."
        )
        self._queue_age = gauge("oldest_queued_seconds", "Age of the oldest queued task.")
        self._groups = counter("completed_groups", "Groups completed through this process.")
        self._bytes = counter(
            "completed_bytes", "Bytes of the groups completed through this process."
        )
        self._tokens = counter(
            "generated_tokens", "Tokens sampled in the groups completed through this process."
        )
        self._reward = Histogram(
            "areal_buffer_group_reward",
            "Mean reward of a completed group.",
            registry=registry,
            buckets=(-1, -0.5, 0, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10),
        )
        self._staleness = Histogram(
            "areal_buffer_staleness_versions",
            "Staleness of the groups in batches, in versions.",
            registry=registry,
            buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
        )
        self._expired = counter("expired_leases", "Expired leases that this process found.")
        self._extended = counter(
            "extended_leases", "Leases that this process extended after an outage."
        )

    def group_completed(self, group: Completion) -> None:
        """Counts a completed group."""
        self._groups.inc()
        self._bytes.inc(len(group.payload))
        self._tokens.inc(group.generated_tokens)
        self._reward.observe(group.mean_reward)

    def batch_taken(self, step: int, take: Take) -> None:
        """Counts a batch that was taken for the first time."""
        for group in take.groups:
            # A batch of step s is consumed by a trainer at version s - 1.
            self._staleness.observe(step - 1 - group.head_version)

    def swept(self, swept: Swept) -> None:
        """Counts what a sweep did."""
        self._expired.inc(swept.requeued)
        self._extended.inc(swept.extended)

    def sampled(self, stats: LedgerStats, memory: MemoryGauge, queue_age_s: float) -> None:
        """Sets the ledger's gauges, once per second."""
        for state, tasks in stats.counts.items():
            self._tasks.labels(state.value).set(tasks)
        self._submitted.set(stats.submitted)
        self._version.set(stats.policy_version)
        self._taken.set(stats.last_taken_step)
        self._committed.set(stats.last_committed_step)
        self._headroom.set(stats.admission_headroom)
        self._regenerated.set(stats.regenerated)
        self._memory.set(memory.redis_bytes)
        self._held.set(stats.held_bytes)
        self._limit.set(memory.limit_bytes)
        self._answered.set_to_current_time()
        self._queue_age.set(queue_age_s)
