"""The sections that services and launchers read."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.config.clusters import KubernetesConfig, SlurmConfig

__all__ = [
    "TRANSPORTS",
    "BufferConfig",
    "CheckpointConfig",
    "DatasetConfig",
    "EndpointsConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "StackConfig",
    "WeightSyncConfig",
    "transport_order",
]


_STORING = ("disk", "stream")
TRANSPORTS = (*_STORING, "distributed")


def transport_order(first: str) -> tuple[str, ...]:
    """The ways to store a version and to read it: the configured one, then the other."""
    ahead = (first,) if first in _STORING else ()
    return (*ahead, *(name for name in _STORING if name != first))


@dataclass
class ModelConfig:
    """The policy to start from: version 0."""

    path: str = ""
    """A Hugging Face model directory. Relative paths are taken from the working directory."""
    tokenizer_path: str = ""
    """Where tokenizer.json lies; empty: the model's directory."""
    dtype: str = "auto"
    """Of the inference servers, and of the weights that are published to them: `float32`,
    `bfloat16`, or `auto` (bfloat16 on GPUs, that of the checkpoint on CPUs)."""
    context_length: int = 4096
    """Prompt and completion together, in tokens."""


@dataclass
class DatasetConfig:
    """A dataset by path or generator name."""

    path: str = ""
    """A .jsonl file, or a name that the recipe understands."""
    batch_size: int = 64
    """Groups per train step (B)."""
    shuffle: bool = True
    """A new order each epoch, from the seed."""


@dataclass
class RolloutConfig:
    """Generation: how much at once, and how stale."""

    max_concurrent_rollouts: int = 256
    """Groups running at once, over all rollout workers."""
    max_head_offpolicyness: int = 2
    """The staleness bound (eta): 0 is synchronous training."""
    straggler_deadline_s: float = 30.0
    """How long a batch waits for groups that would become too stale."""
    lease_ttl_s: float = 30.0
    """A worker that is silent for this long loses its leases."""
    setup_timeout_s: float = 120.0
    """How long to wait for the first inference server."""
    request_timeout_s: float = 600.0
    """One generation request, from sending to its last token."""
    batch_timeout_s: float = 1800.0
    """How long the trainer waits for a batch before it gives up with a named cause."""
    max_attempts: int = 3
    """Attempts ended by the workflow's own error before a task is dead-lettered."""
    max_failure_ratio: float = 0.5
    """The run is stopped when errors of the recipe ended more than this share of its last 64 tasks,
    or the same error all of the first ones: as many as a batch, 16 to 64. 1: never."""
    max_infrastructure_attempts: int = 10
    """Attempts ended by infrastructure before a task is dead-lettered."""
    max_group_bytes: int = 64 * 1024 * 1024
    """A finished group larger than this is refused; as it travels, compressed, at most 90 MiB."""


@dataclass
class RewardConfig:
    """Scoring: worker processes and their limits."""

    workers: int = 1
    """Worker processes per reward service."""
    timeout_s: float = 10.0
    """One call of the reward function."""
    memory_mb: int = 1024
    """Address space a worker may add once its recipe is loaded; so may each child of it."""


@dataclass
class BufferConfig:
    """The ledger."""

    max_memory_mb: int = 2048
    """What this experiment's tasks may take of Redis, in MiB; near it, clients are asked to wait
    and the trainer to checkpoint."""
    serve_result_ttl_s: float = 86400.0
    """How long a served result that no one reads stays; one that was read goes minutes later, and
    either sooner where there is no room."""


@dataclass
class WeightSyncConfig:
    """How policy versions reach the inference servers."""

    transport: str = "disk"
    """disk: safetensors on a volume that all servers mount. stream: uploaded once to weight-sync's
    store, pulled by the servers; no shared volume. The other one is tried when it fails.
    distributed: broadcast by the trainer to the servers that serve (gloo, NCCL on GPUs), and stored
    meanwhile as by disk for newcomers and for whoever the broadcast did not reach."""
    encoding: str = "full"
    """Of what the trainer writes or uploads: full, or delta: only what changed, when that is less
    than half. Servers that hold the version before read the delta, others the whole."""
    sidecar_port: int = 30900
    """Where `python -m areal.weights.sidecar` listens beside each unmodified SGLang (stream)."""
    interrupt: str = "in_place"
    """What running requests feel: in_place (pause), retract (pause, recompute) or abort."""
    max_unavailable: int = 0
    """Serving servers that are updated at once; 0: all, which is right where an update takes
    milliseconds (in_place). The others serve on, and join in as their turn comes."""
    path: str = ""
    """Folder of published versions; empty: `weights/` in the run folder."""
    keep_versions: int = 3
    """Published versions kept on disk."""
    probe_interval_s: float = 1.0
    """Between health probes of a server."""
    update_timeout_s: float = 120.0
    """One server's update, from pause to confirmed."""


@dataclass
class CheckpointConfig:
    """When the trainer saves, what it keeps."""

    freq_steps: int = 20
    """A checkpoint (and a ledger commit) every so many steps; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    recover: str = "auto"
    """auto: resume from the newest valid checkpoint of this trial; never: refuse to overwrite."""


@dataclass
class StackConfig:
    """What `areal run` and `areal up` start, and where."""

    rollout_workers: int = 1
    """Rollout service processes."""
    inference_command: str = ""
    """Starts an inference server, e.g. `/opt/sglang/bin/python -m sglang.launch_server`: model,
    address and limits are added as SGLang's flags. Empty: the CPU engine."""
    inference_max_running: int = 64
    """Requests decoded at once by each inference server."""
    max_restarts: int = 5
    """Restarts of one process within ten minutes before the run is given up."""
    ready_timeout_s: float = 120.0
    """For the whole stack to become ready."""
    gpus_per_node: int = 0
    """GPUs of each node: every inference server and trainer rank gets its own. 0: none."""
    gateway_port: int = 0
    """Of the gateway and its dashboard; 0: a free one, the same at each run of a trial."""
    ranks_per_node: int = 0
    """Trainer ranks on one node; 0: as many as it has GPUs, or all of them where it has none."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


@dataclass
class EndpointsConfig:
    """Where everything is: filled in by `areal run`, set in full by a chart or compose file."""

    redis: str = ""
    """redis://[:password@]host:port/db"""
    nats: str = ""
    """nats://host:port, or several of one cluster, separated by commas"""
    buffer: str = ""
    """host:port of BufferService."""
    rollout: str = ""
    """host:port of RolloutService."""
    reward: str = ""
    """host:port of RewardService."""
    weight_sync: str = ""
    """host:port of WeightSyncService."""
    weight_store: str = ""
    """http://host:port of weight-sync's store, as trainer and servers reach it."""
    trainer: str = ""
    """host:port of TrainerService."""
    gateway: str = ""
    """http://host:port of the gateway."""
    inference: list[str] = field(default_factory=list)
    """Where inference servers are: any of http://HOST:PORT, dns://NAME:PORT (each address of the
    name is one) and kubernetes://NAMESPACE/SERVICE[:PORT] (no namespace: the pod's own). Empty:
    servers register with weight-sync, as `areal run` lets its own do."""
