"""What `areal run --on slurm` and `--on kubernetes` need to know of the place."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["KubernetesConfig", "SlurmConfig"]


@dataclass
class SlurmConfig:
    """The job that `areal run --on slurm` submits."""

    setup: str = ""
    """Shell lines that the job runs first, e.g. `module load cuda`."""
    sbatch: list[str] = field(default_factory=list)
    """Arguments of sbatch, e.g. [--partition=h100, --account=lab, --time=12:00:00]; at a time limit
    the trial ends with a checkpoint a minute before. Whole nodes with all their memory, unless
    --cpus-per-task says how many CPUs of each."""


@dataclass
class KubernetesConfig:
    """The release that `areal run --on kubernetes` installs or upgrades."""

    context: str = ""
    """Of the kubeconfig; empty: the one that is current. It is shown before anything is installed,
    and kept to until the end."""
    namespace: str = ""
    """Empty: the context's."""
    chart: str = "charts/areal"
    """Folder or reference of the chart."""
    values: list[str] = field(default_factory=list)
    """Values files, the later win."""
