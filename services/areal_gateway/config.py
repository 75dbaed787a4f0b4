"""What the gateway allows and how often it looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatewayConfig:
    """Limits and intervals; none of them is in the experiment file."""

    interval_s: float = 1.0
    """Between two looks at the ledger and the servers, and between two status events."""
    trainer_wait_s: float = 10.0
    """A long poll for the trainer's next step row."""
    history: int = 900
    """Samples of queue and throughput kept for pages opened later."""
    max_rows: int = 20_000
    """Step rows kept; the oldest go first."""
    max_body_bytes: int = 32 * 1024 * 1024
    """A request body."""
    max_streams: int = 256
    """Event streams open at once."""
    drain_s: float = 5.0
    """For running requests when the service stops."""
