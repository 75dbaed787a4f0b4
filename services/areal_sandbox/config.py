"""What one sandbox service lends, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from areal.config.experiment import GRPOConfig
from areal.errors import ConfigError
from areal.protocol.boxes import Isolation


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of the service; the first two come from the `sandbox:` section."""

    boxes: int = 8
    """Boxes lent at a time."""
    isolation: Isolation = "namespaces"
    """rlimits: the weaker mode."""
    http: str = ""
    """http://host:port of the E2B-compatible side; empty: none."""
    warm: int = 2
    """Boxes kept ready to be lent."""
    ttl_s: float = 300.0
    """Of a lease, if the request names none."""
    max_ttl_s: float = 86_400.0
    """Of a lease, from now; a request for more is refused."""
    max_waiting: int = 256
    """Commands without a lease that wait for a box; beyond it they are refused (back-pressure)."""
    max_commands: int = 64
    """Running at a time in one lent box."""

    @classmethod
    def from_experiment(cls, experiment: GRPOConfig) -> SandboxConfig:
        """Reads the sections `sandbox` and `endpoints`."""
        section = experiment.sandbox
        if not section.boxes:
            raise ConfigError("sandbox.boxes 0: expected the number of boxes to lend at a time")
        return cls(
            boxes=section.boxes,
            isolation=section.isolation,
            http=experiment.endpoints.sandbox_http,
            warm=min(cls.warm, section.boxes),
        )
