"""What `areal run --on slurm` and `--on kubernetes` need to know of the place."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["KubernetesConfig", "SlurmConfig"]


@dataclass
class SlurmConfig:
    """The job that `areal run --on slurm` submits."""

    partition: str = ""
    """Empty: the cluster's default."""
    account: str = ""
    """Empty: the user's default."""
    hours: float = 0.0
    """Time limit; the trial ends with a checkpoint a minute before. 0: the partition's."""
    cpus_per_node: int = 0
    """CPUs on each node; 0: whole nodes, with all their memory."""
    setup: str = ""
    """Shell lines that the job runs first, e.g. `module load cuda`."""
    sbatch: list[str] = field(default_factory=list)
    """More arguments of sbatch, e.g. [--qos=high, --constraint=h100]."""


@dataclass
class KubernetesConfig:
    """The release that `areal run --on kubernetes` installs or upgrades."""

    context: str = ""
    """Of the kubeconfig; empty: the one that is current. It is shown before anything is installed,
    and kept to until the end."""
    namespace: str = ""
    """Empty: the context's."""
    release: str = ""
    """Empty: experiment and trial, joined."""
    chart: str = "charts/areal"
    """Folder or reference of the chart."""
    values: list[str] = field(default_factory=list)
    """Values files, the later win."""
    helm: str = "helm"
    """The program."""
    kubectl: str = "kubectl"
    """The program."""
    timeout_s: float = 600.0
    """For buffer and weight-sync to become ready; images are pulled meanwhile. The time in which
    the model is made, fetched or copied does not count."""
