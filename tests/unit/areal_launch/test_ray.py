"""What a placement group is asked for."""

from __future__ import annotations

import importlib.util

import pytest

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import CannotStart
from areal_launch.clusters.ray import RayCluster, bundles_of


@pytest.mark.parametrize(
    ("overrides", "bundles"),
    [
        (["allocation_mode=sglang:d2+fsdp:d1"], [{"CPU": 0.1}] * 3),
        (
            ["allocation_mode=sglang:d2t4+fsdp:d16", "stack.gpus_per_node=8"],
            [{"CPU": 1, "GPU": 4}] * 2 + [{"CPU": 1, "GPU": 8}] * 2,
        ),
        (
            ["allocation_mode=sglang:d2+fsdp:d2", "endpoints.inference=[http://gpu:30000]"],
            [{"CPU": 0.1}],
        ),
    ],
)
def test_bundles_when_allocated_then_one_per_server_and_trainer_node(
    overrides: list[str], bundles: list[dict[str, float]]
) -> None:
    assert bundles_of(build_config(GRPOConfig, None, overrides)) == bundles


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed here")
async def test_place_when_ray_is_not_installed_then_one_line_says_what_to_install() -> None:
    with pytest.raises(CannotStart, match=r"install .areal-services\[ray\]"):
        await RayCluster().open(build_config(GRPOConfig, None, []))
