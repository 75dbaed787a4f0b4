"""What the rollout service needs of the experiment file, and its own constants."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from areal.chassis.process import PROCESS_VARIABLE, open_files
from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import GRPOConfig
from areal.config.learning_rules import needs_several
from areal.errors import ConfigError
from areal.types import GenerationHyperparameters
from areal_rollout.generation.connections import RESERVED_FILES


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of the worker; times are in seconds.

    Example:
        >>> RolloutConfig(worker_id="rollout-7f3a", capacity=256)
    """

    worker_id: str
    """Unique among all workers."""
    boot: int = 0
    """For a worker whose id outlives its process: a number that is larger with each start, so that
    the buffer at once takes back what its previous incarnation held."""
    capacity: int
    """Most concurrent episodes in this process; the ledger bounds all processes together."""
    connections: int = 1024
    """Concurrent connections to inference servers."""
    max_leases: int = 64
    """Most tasks taken in one call, so that several workers share a burst."""
    dynamic_sampling: bool = False
    """Whether a training group whose samples all have the same reward is rejected."""
    reject_single: bool = False
    """Whether, with `dynamic_sampling`, a group of one sample is rejected too, because its
    advantage would be 0."""
    lease_wait_s: float = 1.0
    """How long one call waits for a task; also how long a drain waits for the call."""
    lease_ttl_s: float = 30.0
    """Leases are renewed three times in it."""
    request_timeout_s: float = 600.0
    """One generation request, from sending to its last token."""
    setup_timeout_s: float = 120.0
    """How long a request waits for a server at its version, beside `asleep_s`."""
    asleep_s: float = 0.0
    """How long servers may sleep while the trainer has their GPUs. A request's own deadline does
    not count the time in which it waits for a server then."""
    episode_timeout_s: float = 2400.0
    """An episode that runs longer is ended: the fault of its workflow, since every wait inside
    agenerate and score has a shorter deadline of its own."""
    report_timeout_s: float = 900.0
    """How long a finished group is offered to a buffer that is away or full."""
    drain_s: float = 15.0
    """Seconds that running episodes get when the service stops."""
    journal_max_bytes: int = 16 * 1024 * 1024
    """A longer journal is dropped: the next attempt starts afresh."""
    namespace: str = ""
    nats: str = ""
    """Empty: no announcements, the servers are asked for every two seconds."""
    buffer: str = ""
    reward: str = ""
    weight_sync: str = ""
    trainer: str = ""
    """Empty: a recommendation of servers rests only on generation."""
    tokenizer_dir: Path = Path()
    model_dir: Path = Path()
    context_length: int = 0
    router_replay: bool = False
    """Servers of a mixture of experts are asked which experts they chose."""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How sessions of outside agents sample."""

    @classmethod
    def from_experiment(cls, experiment: GRPOConfig) -> RolloutConfig:
        """Reads `rollout`, `model`, `gconfig` and `endpoints`, and the name from the launcher.

        Raises:
            ConfigError: A service that every worker needs has no address.
        """
        rollout, ends = experiment.rollout, experiment.endpoints
        for key in ("buffer", "reward", "weight_sync"):
            if not getattr(ends, key):
                raise ConfigError(f"endpoints.{key} '': expected host:port")
        worker_id, boot = worker_identity()
        connections = max(1, open_files() - RESERVED_FILES)
        turns = parse_allocation(experiment.allocation_mode).sharing is Sharing.ALTERNATING
        # The deadline of the trainer's collectives: a running trainer's turn is never longer.
        asleep_s = 5 * experiment.setup_timeout_s if turns else 0.0
        return cls(
            worker_id=worker_id,
            boot=boot,
            # No more episodes than the process may have connections.
            capacity=min(rollout.max_concurrent_rollouts, connections),
            connections=connections,
            lease_ttl_s=rollout.lease_ttl_s,
            dynamic_sampling=rollout.dynamic_sampling,
            reject_single=needs_several(experiment.actor),
            request_timeout_s=rollout.request_timeout_s,
            setup_timeout_s=experiment.setup_timeout_s,
            asleep_s=asleep_s,
            episode_timeout_s=4 * (rollout.request_timeout_s + asleep_s),
            namespace=experiment.namespace,
            nats=ends.nats,
            buffer=ends.buffer,
            reward=ends.reward,
            weight_sync=ends.weight_sync,
            trainer=ends.trainer,
            tokenizer_dir=experiment.tokenizer_dir,
            model_dir=Path(experiment.model.path),
            context_length=experiment.model.context_length,
            router_replay=rollout.router_replay,
            gconfig=experiment.gconfig,
        )


def worker_identity() -> tuple[str, int]:
    """Returns this worker's id, and a number for each start if its name outlives its process.

    The launcher names its processes; so does a pod's `AREAL_PROCESS`. The number is the time in
    microseconds: a name's processes start on one machine, one after the other.
    """
    host = socket.gethostname()
    if name := os.environ.get(PROCESS_VARIABLE, ""):
        return f"{host}-{name}", time.time_ns() // 1000
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}", 0
