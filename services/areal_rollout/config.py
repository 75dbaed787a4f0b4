"""What the rollout service needs of the experiment file, and its own constants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal.config.experiment import GRPOConfig


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Times in seconds.

    Example:
        >>> ExecutorConfig(worker_id="rollout-7f3a", capacity=256)
    """

    worker_id: str
    """Unique among all workers."""
    boot: int = 0
    """Of a worker whose id outlives its process: larger with each start, so that the ledger takes
    back at once what an earlier life held."""
    capacity: int
    """Episodes at once in this process; the ledger bounds all processes together."""
    max_leases: int = 64
    """Tasks taken in one call, so that several workers share a burst."""
    lease_wait_s: float = 1.0
    """How long one call waits for a task; also how long a drain waits for the call."""
    lease_ttl_s: float = 30.0
    """Leases are renewed three times in it."""
    episode_timeout_s: float = 2400.0
    """An episode that runs longer is ended: the fault of its workflow, since every wait inside
    agenerate and score has a shorter deadline of its own."""
    hand_in_timeout_s: float = 900.0
    """How long a finished group is offered to a ledger that is away or full."""
    journal_max_bytes: int = 16 * 1024 * 1024
    """A longer journal is dropped: the next attempt starts afresh."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The service's view of the experiment file."""

    namespace: str
    nats: str
    buffer: str
    reward: str
    weight_sync: str
    trainer: str
    tokenizer_dir: Path
    model_dir: Path
    context_length: int
    request_timeout_s: float
    setup_timeout_s: float
    capacity: int
    lease_ttl_s: float

    @classmethod
    def from_experiment(cls, config: GRPOConfig) -> RolloutSettings:
        """Reads the sections that matter here."""
        rollout, ends = config.rollout, config.endpoints
        return cls(
            namespace=config.namespace,
            nats=ends.nats,
            buffer=ends.buffer,
            reward=ends.reward,
            weight_sync=ends.weight_sync,
            trainer=ends.trainer,
            tokenizer_dir=config.tokenizer_dir,
            model_dir=Path(config.model.path),
            context_length=config.model.context_length,
            request_timeout_s=rollout.request_timeout_s,
            setup_timeout_s=rollout.setup_timeout_s,
            capacity=rollout.max_concurrent_rollouts,
            lease_ttl_s=rollout.lease_ttl_s,
        )

    def executor(self, worker_id: str, boot: int, connections: int) -> ExecutorConfig:
        """The part for the executor; no more episodes than the process may have connections."""
        return ExecutorConfig(
            worker_id=worker_id,
            boot=boot,
            capacity=min(self.capacity, connections),
            lease_ttl_s=self.lease_ttl_s,
            episode_timeout_s=4 * self.request_timeout_s,
        )
