"""The sections that services and launchers read.

A service that reads a section of its own name runs with another class, `areal_rollout.config`'s
`RolloutConfig` for example; such a section is a `RolloutSection`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from areal.config.transports import TransportName, in_object_store


def rollouts_url(versions: str) -> str:
    """Where copies of kept rollouts go: beside the versions, if those are in an object store."""
    return f"{versions.rstrip('/')}-rollouts" if in_object_store(versions) else ""


@dataclass
class ModelConfig:
    """The model that training starts from, which is policy version 0."""

    path: str = ""
    """A Hugging Face model directory; a relative path is resolved against the working directory.
    `areal run` also accepts `org/name[@revision]` (a model on the Hugging Face Hub) and
    `s3://bucket/folder` (gs://, az://), and downloads the model into `models/` first. With a recipe
    that can create its model, and on Kubernetes, write `hf://org/name`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the inference servers and of published weights: `float32`, `bfloat16`, or `auto`
    (bfloat16 on GPUs, the checkpoint's dtype on CPUs)."""
    context_length: Annotated[int, Ge(1)] = 4096
    """Maximum length of prompt and completion together, in tokens."""


@dataclass
class DatasetConfig:
    """The rows that training reads."""

    path: str = ""
    """A file of rows, such as rows.jsonl, a folder of them, `hf://org/name[/config][@revision]`
    (docs/data.md), or a name that the recipe understands."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Groups per train step (B); in a run without servers, rows per train step."""


@dataclass
class RolloutSection:
    """Generation: how many groups run at once, and how stale they may become."""

    max_concurrent_rollouts: Annotated[int, Ge(1)] = 256
    """Maximum number of groups that run at once, across all rollout workers."""
    max_head_offpolicyness: Annotated[int, Ge(0)] = 2
    """The staleness bound (eta), in policy versions. With 0, generation and training take turns."""
    lease_ttl_s: Annotated[float, Gt(0)] = 30.0
    """A rollout worker that has not renewed its leases for this many seconds loses them."""
    setup_timeout_s: Annotated[float | None, Gt(0)] = None
    """Deadline, in seconds, for everything that loads the model: the start of the whole stack, the
    start of the first inference server, and a server's update to a new version. A generation
    request also waits this long for a server with a recent enough version. null means 120 s, or
    1200 s if `stack.gpus_per_node` is above 0, because SGLang compiles kernels at its first
    start."""
    request_timeout_s: Annotated[float, Gt(0)] = 600.0
    """Deadline, in seconds, for one generation request, including interruptions. An episode may
    take 4 times as long. The trainer waits 3 times as long for a batch, then exits with an error
    that names the cause."""
    max_failure_ratio: Annotated[float, Ge(0), Le(1)] = 0.5
    """The run stops if more than this share of its last 64 tasks failed because of an error in the
    recipe. It also stops if all of its first tasks (one batch, but at least 16 and at most 64)
    failed with the same error in the recipe. With 1, the run never stops for these reasons."""
    dynamic_sampling: bool = False
    """Reject a training group if all its samples have the same reward, because such a group
    teaches nothing; a group of one is rejected if `actor.reward_norm` compares the samples of a
    group. `prepare_batch` then submits another row to replace it (DAPO). With
    `rollout_batch`, the batch gets smaller."""

    router_replay: bool = True
    """Ask servers which experts they chose for each token of a mixture of experts, and train the
    policy with the same ones. The choice takes a byte for each expert of a token in each layer
    (two with more than 256 experts), in the ledger too. Without it, or where a server does not
    say, the trainer's router chooses, and `mismatch/kl` is higher."""

    @property
    def batch_timeout_s(self) -> float:
        """The trainer's limit for a batch: enough for several requests in a row, and retries."""
        return 3 * self.request_timeout_s


@dataclass
class RewardSection:
    """Scoring: worker processes and their limits."""

    workers: Annotated[int, Ge(1)] = 1
    """Number of worker processes in each reward service."""
    timeout_s: Annotated[float, Gt(0)] = 10.0
    """Time limit for one call of the reward function, in seconds."""
    memory_mb: Annotated[int, Ge(64)] = 1024
    """Address space, in MiB, that a worker may add after loading its recipe. Each of its child
    processes may add as much."""
    isolation: Literal["process", "sandbox"] = "process"
    """`process`: a worker has limits on time and memory. `sandbox`: the worker also runs in a box
    (bubblewrap). There it has no network, no files except Python and its packages, and no view of
    other processes. If user namespaces are not allowed, the service does not start."""


@dataclass
class SandboxSection:
    """The sandbox service, which lends boxes for untrusted code."""

    boxes: Annotated[int, Ge(0)] = 0
    """How many boxes each sandbox service may lend at a time. With 0, `areal run` does not start
    the service."""
    isolation: Literal["namespaces", "rlimits"] = "namespaces"
    """How boxes are isolated. `namespaces` uses bubblewrap; if the machine does not allow user
    namespaces, the service does not start. `rlimits` uses resource limits, a filter of system
    calls, and Landlock if the kernel has it; it does not protect against malicious code
    (docs/isolation.md)."""


@dataclass
class BufferSection:
    """The buffer service, which keeps the ledger in Redis."""

    max_memory_mb: Annotated[int, Ge(0)] = 2048
    """Redis memory for this run's tasks, in MiB. When this memory is nearly full, clients must
    wait, and the trainer saves a checkpoint to free memory."""


@dataclass
class WeightSyncSection:
    """How policy versions reach the inference servers."""

    transport: TransportName = "disk"
    """How servers get new weights; docs/weight-sync.md says what each transport does and needs. If
    one that stores versions fails, the next one is tried."""
    encoding: Literal["full", "delta"] = "full"
    """What the trainer writes or uploads. `full`: all weights. `delta`: only the changes, unless
    they are at least half as large as all weights. Servers that have the previous version read the
    changes; other servers read all weights."""
    interrupt: Literal["in_place", "retract", "abort"] = "in_place"
    """What an update does to running requests. `in_place`: they pause. `retract`: they pause, and
    their KV cache is computed again. `abort`: they end, and rollout workers continue them with
    new requests."""
    max_unavailable: Annotated[int, Ge(0)] = 0
    """How many serving servers are updated at once; the others serve until it is their turn. 0
    means all at once, which is right if an update takes milliseconds (`in_place`)."""
    path: str = ""
    """Folder of the published versions, or s3://bucket/prefix (gs://, az://): the `disk` transport
    uploads versions there, and servers download them. Empty means `weights/` in the run folder."""
    probe_interval_s: Annotated[float, Gt(0)] = 1.0
    """Seconds between health probes of a server; use a longer time with thousands of servers."""


@dataclass
class CheckpointConfig:
    """When the trainer saves, and what it keeps."""

    freq_steps: Annotated[int, Ge(0)] = 20
    """Number of steps between checkpoints. In the ledger, each checkpoint commits the steps since
    the previous one. With 0, there is only one checkpoint, at the end."""
    keep: Annotated[int, Ge(1)] = 2
    """How many of the newest checkpoints to keep. The checkpoint with the best evaluation is kept
    too. Of the published versions, the newest `keep` + 1 are kept."""
    rollouts_gib: Annotated[float, Ge(0)] = 4.0
    """How many GiB of groups to keep in the run folder for `areal show` and `areal export`; the
    oldest steps are deleted first. With 0, no groups are kept. If `weight_sync.path` is in an
    object store, the groups are also copied to that path with `-rollouts` added."""


@dataclass
class SlurmConfig:
    """The job that `areal run --on slurm` submits."""

    setup: str = ""
    """Shell lines that the job runs first, e.g. `module load cuda`."""
    sbatch: list[str] = field(default_factory=list)
    """Arguments for sbatch, e.g. [--partition=h100, --account=lab, --time=12:00:00]. One minute
    before the job's time limit, the trainer saves a checkpoint and the job ends. The job takes
    whole nodes with all their memory, unless --cpus-per-task is given."""


@dataclass
class KubernetesConfig:
    """The release that `areal run --on kubernetes` installs or upgrades."""

    context: str = ""
    """Context of the kubeconfig; empty means the current context. The command prints the context
    before it installs anything, and uses the same context throughout."""
    namespace: str = ""
    """Namespace of the release; empty means the namespace of the context."""
    chart: str = "charts/areal"
    """The Helm chart: a folder, or a reference that helm accepts."""
    values: list[str] = field(default_factory=list)
    """Helm values files; later files take precedence."""


@dataclass
class StackConfig:
    """What `areal run` and `areal up` start, and where."""

    rollout_workers: Annotated[int, Ge(1)] = 1
    """Number of rollout service processes."""
    inference_command: str = ""
    """Command that starts an inference server, e.g. `/opt/sglang/bin/python -m
    sglang.launch_server`; model, address and limits are added as SGLang's flags. `cpu` means the
    CPU engine, which takes no GPU. Empty means the SGLang that `make sglang-gpu` installed if
    `stack.gpus_per_node` is above 0 (without it the run does not start), otherwise the CPU
    engine."""
    inference_max_running: Annotated[int, Ge(1)] = 256
    """Maximum number of requests that each inference server decodes at once."""
    max_restarts: Annotated[int, Ge(0)] = 5
    """How many times a process may restart within ten minutes of being up; one more failure ends
    the run. A start that fails, however long it takes, uses up none of these minutes."""
    gpus_per_node: Annotated[int, Ge(0)] = 0
    """Number of GPUs on each node. Inference servers and trainer ranks do not share GPUs. On this
    machine they are the first of `CUDA_VISIBLE_DEVICES` (indices, UUIDs or MIG slices), if it is
    set. With 0, servers and trainer see no GPU, and compute on CPUs."""
    gateway_port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port of the gateway and its dashboard. With 0, a free port is chosen; a trial that runs
    again takes the same port if it is still free."""
    ranks_per_node: Annotated[int, Ge(0)] = 0
    """Number of trainer ranks on each node. 0 means one for each GPU, or all ranks on one node if
    nodes have no GPUs."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


@dataclass
class EndpointsConfig:
    """Addresses of services. `areal run` fills them in; the chart and the Compose file set them."""

    redis: str = ""
    """redis://[:password@]host:port/db."""
    nats: str = ""
    """nats://host:port; for a cluster, the addresses of several servers, separated by commas."""
    buffer: str = ""
    """host:port of BufferService; for several replicas, as in `rollout`."""
    rollout: str = ""
    """host:port of RolloutService. Calls are spread over replicas: over all addresses of the name,
    or over several addresses, separated by commas; names in such a list are looked up once."""
    reward: str = ""
    """host:port of RewardService; for several replicas, as in `rollout`."""
    weight_sync: str = ""
    """host:port of WeightSyncService."""
    weight_store: str = ""
    """http://host:port at which the trainer and the servers reach weight-sync's store."""
    trainer: str = ""
    """host:port of TrainerService."""
    gateway: str = ""
    """http://host:port of the gateway."""
    sandbox: str = ""
    """host:port of SandboxService."""
    sandbox_http: str = ""
    """http://host:port of the sandbox service's E2B-compatible API. If empty, `areal run` chooses a
    free port for the API, and a service that you start yourself does not serve the API."""
    inference: list[str] = field(default_factory=list)
    """Where to find inference servers. Each entry is http://HOST:PORT, dns://NAME:PORT (each
    address of the name is a server) or kubernetes://NAMESPACE/SERVICE[:PORT] (an empty NAMESPACE
    is the pod's own). If the list is empty, servers must register with weight-sync.
    Servers that `areal run` starts do this automatically."""
