"""Compiled layers whose experts are spread over ranks (gloo): the gradients of one eager rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, launch
from tests.unit.areal.engines.hub_families import make_family
from tests.unit.areal.engines.train_fixtures import assert_gradients_close


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_gradients_when_experts_are_spread_and_compiled_then_equal_those_of_one_eager_rank(
    tmp_path: Path,
) -> None:
    model = make_family("qwen3_moe", tmp_path / "model", num_key_value_heads=4)

    def job(layout: str, kernels: str) -> dict[str, Any]:
        config = {
            "path": str(model),
            "dtype": "float32",
            "layout": layout,
            "kernels": kernels,
            "gradient_checkpointing": False,
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 70},
        }
        return {"config": config, "out": str(tmp_path / layout), "seeds": [0], "gradients": True}

    launch(tmp_path, [[1, [job("d1", "eager")]], [2, [job("d2e2", "compile")]]])
    assert_gradients_close(load_file(tmp_path / "d2e2"), load_file(tmp_path / "d1"), 1e-5)
    ours, one = (json.loads((tmp_path / f"{each}.json").read_text()) for each in ("d2e2", "d1"))
    assert ours[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
