"""What `areal run --on …` needs to know of the place."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SlurmConfig"]


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
