"""What one reward service may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.config.experiment import GRPOConfig


@dataclass(frozen=True)
class RewardConfig:
    """Limits of the worker pool; the first four come from the `reward:` section."""

    workers: int = 1
    """Worker processes."""
    timeout_s: float = 10.0
    """Time limit of one call of a reward function, in seconds."""
    memory_mb: int = 1024
    """Address space a worker may add to what it had when its function was loaded, in MiB."""
    isolation: Literal["process", "sandbox"] = "process"
    """`process`, or `sandbox`: each worker is in a box (areal.sandbox)."""
    max_waiting_items: int = 16384
    """Most items that may wait for a worker; further calls are refused as Unavailable
    (back-pressure)."""
    load_timeout_s: float = 60.0
    """Deadline of a worker's start and of the import of a recipe, in seconds."""
    buffer: str = ""
    """host:port of the service that keeps recipes; empty: only built-in functions."""

    @classmethod
    def from_experiment(cls, experiment: GRPOConfig) -> RewardConfig:
        """Reads the sections `reward` and `endpoints`."""
        section = experiment.reward
        return cls(
            workers=section.workers,
            timeout_s=section.timeout_s,
            memory_mb=section.memory_mb,
            isolation=section.isolation,
            buffer=experiment.endpoints.buffer,
        )
