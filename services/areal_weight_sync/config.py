"""What weight-sync needs of the experiment file, and its own constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import GRPOConfig
from areal.config.transports import in_object_store, transport_order
from areal.weights.served_adapters import served_adapters
from areal_weight_sync.engine.routes import Routes

# Where `python -m areal.weights.sidecar` listens beside each unmodified SGLang: one on each host.
SIDECAR_PORT = 30900


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Settings of the service; times are in seconds.

    Example:
        >>> WeightSyncConfig(interrupt="in_place", probe_interval_s=1.0, update_timeout_s=120.0)
    """

    interrupt: str = "in_place"
    """in_place, retract or abort: the mode of /pause_generation."""
    max_unavailable: int = 0
    """Serving servers updated at once; 0: all."""
    probe_interval_s: float = 1.0
    """Seconds between health probes of a server, and between attempts to reach one that was never
    reached."""
    probe_timeout_s: float = 2.0
    """Deadline of a health probe: a server that misses two in a row is quarantined, one that a
    client has reported after the first."""
    deep_probe_every: int = 5
    """Every so many probes also ask the scheduler (/v1/loads) and compare the boot id. Behind a
    proxy, whose connections outlive a server, this is how a restart is noticed."""
    update_timeout_s: float = 120.0
    """Deadline of one server's update, from pause to confirmed, in seconds."""
    control_timeout_s: float = 10.0
    """Deadline of pause and continue, in seconds (SGLang's pause in mode abort polls once a
    second)."""
    serving_grace_s: float = 2.0
    """An update shorter than this leaves the server listed SERVING."""
    backoff_s: float = 0.5
    """First retry of a quarantined server; doubles, with jitter."""
    backoff_max_s: float = 15.0
    """Longest time between retries."""
    logprob_tolerance: float = 0.1
    """Mean |difference| in nats of the probe's logprobs, for engines without checksums. Servers
    that batch differently in bfloat16 stay below 0.02; wrong weights are above 1."""
    adapter_rank: int = 0
    """Rank of the adapters that the trainer publishes; 0: it publishes whole weights."""
    turns: bool = False
    """Whether servers sleep while the trainer computes on their GPUs."""
    turn_lease_s: float = 15.0
    """Seconds for which a new coordinator leaves sleeping servers asleep."""
    lease_ttl_s: float = 3.0
    """A coordinator silent for this long is replaced by a standby."""
    namespace: str = ""
    redis: str = ""
    nats: str = ""
    """NATS URL; empty: no announcements."""
    model_path: Path = Path()
    """Model directory of version 0."""
    weights_root: Path | None = None
    """Folder of published versions, cleaned as versions age; None: never."""
    objects: str = ""
    """{s3,gs,az}://bucket/prefix of published versions; empty: they are in the folder."""
    keep_versions: int = 3
    """Number of published versions that are kept."""
    endpoints: tuple[str, ...] = ()
    """Where inference servers are listed, as in `endpoints.inference`."""
    routes: Routes = field(default_factory=Routes)

    @classmethod
    def from_experiment(cls, experiment: GRPOConfig) -> WeightSyncConfig:
        """Reads `weight_sync`, `model` and `endpoints`."""
        own, ends = experiment.weight_sync, experiment.endpoints
        adapters, _ = served_adapters(experiment)
        objects = own.path if in_object_store(own.path) else ""
        folder = own.path if not objects else ""
        return cls(
            interrupt=own.interrupt,
            max_unavailable=own.max_unavailable,
            probe_interval_s=own.probe_interval_s,
            update_timeout_s=experiment.setup_timeout_s,
            adapter_rank=adapters.rank if adapters is not None else 0,
            turns=parse_allocation(experiment.allocation_mode).sharing is Sharing.ALTERNATING,
            namespace=experiment.namespace,
            redis=ends.redis,
            nats=ends.nats,
            model_path=Path(experiment.model.path).resolve(),
            weights_root=Path(folder) if folder else experiment.run_dir / "weights",
            objects=objects,
            # One for each checkpoint, and the newest.
            keep_versions=experiment.checkpoint.keep + 1,
            endpoints=tuple(ends.inference),
            routes=Routes(transport_order(own.transport), ends.weight_store, SIDECAR_PORT),
        )
