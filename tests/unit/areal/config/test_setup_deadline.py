"""How long the start of a server may take: by device, unless the user says."""

from __future__ import annotations

import pytest

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "seconds", "collective"),
    [
        ([], 120.0, 600.0),
        (["stack.gpus_per_node=2"], 1200.0, 1800.0),
        (["stack.gpus_per_node=2", "rollout.setup_timeout_s=300"], 300.0, 1500.0),
        (["rollout.setup_timeout_s=30"], 30.0, 150.0),
        (["rollout.setup_timeout_s=null"], 120.0, 600.0),
    ],
)
def test_deadline_when_not_set_then_that_of_the_device(
    overrides: list[str], seconds: float, collective: float
) -> None:
    config = build_config(GRPOConfig, None, overrides)
    assert config.setup_timeout_s == seconds
    assert config.actor.distributed_timeout_seconds == collective
    assert collective > seconds, "rank 0 may wait for a server while the others wait for it"


def test_deadline_when_it_is_zero_then_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.setup_timeout_s 0\.0: expected more than 0"):
        build_config(GRPOConfig, None, ["rollout.setup_timeout_s=0"])
