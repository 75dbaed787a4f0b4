"""What the coordinator needs of the experiment file, and its own constants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal.config.experiment import BaseExperimentConfig
from areal.config.services import in_object_store, transport_order
from areal_weight_sync.engine.routes import Routes


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Times in seconds.

    Example:
        >>> CoordinatorConfig(interrupt="in_place", probe_interval_s=1.0, update_timeout_s=120.0)
    """

    interrupt: str = "in_place"
    """in_place, retract or abort: the mode of /pause_generation."""
    max_unavailable: int = 0
    """Serving servers updated at once; 0: all."""
    probe_interval_s: float = 1.0
    """Between health probes of a server; also between attempts to reach one never reached."""
    probe_timeout_s: float = 2.0
    """Deadline of a health probe: a server that misses two in a row is quarantined, one that a
    client has reported after the first."""
    deep_probe_every: int = 5
    """Every so many probes also ask the scheduler (/v1/loads) and compare the boot id."""
    update_timeout_s: float = 120.0
    """One server's update, from pause to confirmed."""
    control_timeout_s: float = 10.0
    """Pause and continue (SGLang's pause in mode abort polls once a second)."""
    serving_grace_s: float = 2.0
    """An update shorter than this leaves the server listed SERVING."""
    backoff_s: float = 0.5
    """First retry of a quarantined server; doubles, with jitter."""
    backoff_max_s: float = 15.0
    """Longest time between retries."""
    logprob_tolerance: float = 0.1
    """Mean |difference| in nats of the probe's logprobs, for engines without checksums. Servers
    that batch differently in bfloat16 stay below 0.02; wrong weights are above 1."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncSettings:
    """The service's view of the experiment file."""

    coordinator: CoordinatorConfig
    namespace: str
    redis: str
    nats: str
    model_path: Path
    weights_root: Path
    objects: str
    """{s3,gs,az}://bucket/prefix of published versions; empty: they are in a folder."""
    keep_versions: int
    servers: tuple[str, ...]
    routes: Routes
    store: str
    """http://host:port of the weight store; empty: none."""
    lease_ttl_s: float = 3.0
    """A coordinator silent for this long is replaced by a standby."""


def settings(config: BaseExperimentConfig) -> WeightSyncSettings:
    """Reads the sections that matter here."""
    own = config.weight_sync
    folder = own.path and not in_object_store(own.path)
    return WeightSyncSettings(
        coordinator=CoordinatorConfig(
            interrupt=own.interrupt,
            max_unavailable=own.max_unavailable,
            probe_interval_s=own.probe_interval_s,
            update_timeout_s=own.update_timeout_s,
        ),
        namespace=config.namespace,
        redis=config.endpoints.redis,
        nats=config.endpoints.nats,
        model_path=Path(config.model.path),
        weights_root=Path(own.path) if folder else config.run_dir / "weights",
        objects=own.path if in_object_store(own.path) else "",
        keep_versions=own.keep_versions,
        servers=tuple(config.endpoints.inference),
        routes=Routes(
            transport_order(own.transport), config.endpoints.weight_store, own.sidecar_port
        ),
        store=config.endpoints.weight_store,
    )
