"""What the buffer reads from the experiment file."""

from __future__ import annotations

from dataclasses import dataclass

from areal.config.experiment import GRPOConfig
from areal.protocol.trajectories import MAX_GROUP_BYTES
from areal_buffer.records import ENDED_BYTES, RECORD_BYTES

# Groups that no step trains on may have this part of the ledger's memory.
_SPARE_PART = 10


@dataclass(frozen=True)
class BufferConfig:
    """Limits of the ledger. Times in milliseconds, sizes in bytes."""

    namespace: str
    redis_url: str
    batch_size: int
    """Groups per train step until a trainer registers its own."""
    max_head_offpolicyness: int
    max_concurrent_rollouts: int
    lease_ttl_ms: int
    sweep_interval_ms: int
    """Two of these without a sweep count as an outage, and leases are extended."""
    max_failure_ratio: float
    max_memory_bytes: int
    spare_bytes: int = 0
    """Part of these bytes for groups that no step trains on and that the trainer keeps with its
    rollouts; 0: it keeps none."""
    straggler_deadline_ms: int = 30_000
    """How long a batch waits for groups that would become too stale."""
    max_attempts: int = 3
    """Attempts ended by the workflow's own error before a task is dead-lettered."""
    max_infrastructure_attempts: int = 10
    """Attempts ended by infrastructure before that; more, because they are not the task's fault."""
    serve_result_ttl_ms: int = 24 * 3600 * 1000
    """How long a served result that no one reads stays; one that was read is released minutes
    later, and either sooner where there is no room."""
    first_call_ms: int = 600_000
    """How long a session without any call keeps its slot, if its agent may be silent for longer."""
    recipes_bytes: int = 32 * 1024 * 1024
    """Bytes of recipes that are kept; the least recently used are deleted, except the trainers'."""
    max_group_bytes: int = MAX_GROUP_BYTES
    max_regenerations: int = 3
    """Times a group is generated again for being too stale before it is dead-lettered."""
    kept_place_ms: int = 5_000
    """How long a slot is reserved for an agent that was refused a session, which will ask again."""

    @classmethod
    def from_experiment(cls, config: GRPOConfig) -> BufferConfig:
        """Reads the sections `rollout`, `buffer` and `train_dataset`."""
        rollout = config.rollout
        lease_ttl_ms = max(100, int(rollout.lease_ttl_s * 1000))
        return cls(
            namespace=config.namespace,
            redis_url=config.endpoints.redis,
            batch_size=config.train_dataset.batch_size,
            max_head_offpolicyness=rollout.max_head_offpolicyness,
            max_concurrent_rollouts=rollout.max_concurrent_rollouts,
            lease_ttl_ms=lease_ttl_ms,
            sweep_interval_ms=min(5_000, lease_ttl_ms // 4),
            max_failure_ratio=rollout.max_failure_ratio,
            max_memory_bytes=config.buffer.max_memory_mb * 1024 * 1024,
            spare_bytes=config.buffer.max_memory_mb * 1024 * 1024 // _SPARE_PART
            if config.checkpoint.rollouts_gib
            else 0,
        )

    def as_lua(self) -> str:
        """Returns the numbers that the scripts need, as a Lua table constructor."""
        names = (
            "batch_size",
            "max_head_offpolicyness",
            "max_concurrent_rollouts",
            "lease_ttl_ms",
            "sweep_interval_ms",
            "straggler_deadline_ms",
            "max_attempts",
            "max_failure_ratio",
            "max_infrastructure_attempts",
            "max_regenerations",
            "serve_result_ttl_ms",
            "kept_place_ms",
            "spare_bytes",
            "recipes_bytes",
            "first_call_ms",
        )
        numbers = {name: getattr(self, name) for name in names}
        numbers |= {"record_bytes": RECORD_BYTES, "ended_bytes": ENDED_BYTES}
        return "{" + ",".join(f"{name}={number}" for name, number in numbers.items()) + "}"
