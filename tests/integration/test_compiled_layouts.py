"""Compiled layers whose tokens or experts are spread over ranks (gloo): as one eager rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, launch
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

CASES = {"d1c2": "qwen3", "d2e2": "qwen3_moe"}

pytestmark = [pytest.mark.timeout(2 * LIMIT_S), pytest.mark.long]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of each job's gradients and statistics: `KIND-LAYOUT`."""
    folder = tmp_path_factory.mktemp("compiled")

    def job(layout: str, kind: str, kernels: str) -> dict[str, Any]:
        config = {
            "path": str(folder / kind),
            "dtype": "float32",
            "layout": layout,
            "kernels": kernels,
            "gradient_checkpointing": False,
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 70},
        }
        out = str(folder / f"{kind}-{layout}.gradients")
        return {"config": config, "out": out, "seeds": [0], "gradients": True}

    for kind in CASES.values():
        make_family(kind, folder / kind, num_key_value_heads=4)
    one = [job("d1", kind, "eager") for kind in CASES.values()]
    two = [job(layout, kind, "compile") for layout, kind in CASES.items()]
    launch(folder, [[1, one], [2, two]])
    return folder


@pytest.mark.parametrize("layout", CASES)
def test_gradients_when_layers_are_spread_and_compiled_then_equal_those_of_one_eager_rank(
    outputs: Path, layout: str
) -> None:
    ours, one = (outputs / f"{CASES[layout]}-{each}.gradients" for each in (layout, "d1"))
    assert_gradients_close(load_file(ours), load_file(one), 1e-5)
    rows, rows1 = (json.loads(Path(f"{each}.json").read_text()) for each in (ours, one))
    assert rows[0]["n_micro_batches"] > 1  # of several lengths: the layers have no fixed one
    assert rows[0]["loss"] == pytest.approx(rows1[0]["loss"], rel=1e-5)
