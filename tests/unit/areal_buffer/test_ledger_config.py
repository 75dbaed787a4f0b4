"""The ledger's times, as the experiment file's settings give them."""

from __future__ import annotations

import pytest

from areal.config.experiment import GRPOConfig, build_config
from areal_buffer.config import BufferConfig


@pytest.mark.parametrize(
    ("lease_ttl_s", "sweep_ms"), [(0.5, 125), (2.0, 500), (20.0, 5_000), (600.0, 5_000)]
)
def test_sweep_when_a_lease_lasts_so_long_then_four_times_in_it_and_every_five_seconds(
    lease_ttl_s: float, sweep_ms: int
) -> None:
    """Two intervals without one count as an outage, which must be shorter than a lease."""
    experiment = build_config(GRPOConfig, None, [f"rollout.lease_ttl_s={lease_ttl_s}"])
    config = BufferConfig.from_experiment(experiment)
    assert (config.lease_ttl_ms, config.sweep_interval_ms) == (lease_ttl_s * 1000, sweep_ms)
