"""Router replay on several ranks: each computes its tokens with the experts that are theirs."""

import json

import pytest
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, launch
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

pytestmark = [pytest.mark.timeout(4 * LIMIT_S), pytest.mark.filterwarnings("ignore")]
LAYOUTS = {2: ["d2", "d1c2", "d2e2"], 4: ["d2t2e2", "d2c2e2"]}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_when_routes_are_replayed_on_ranks_then_equal_those_of_one_rank(tmp_path, ranks):
    make_family("qwen3_moe", tmp_path / "model")
    routed = {"layers": 2, "experts": 4, "chosen": 2}

    def job(layout, name="", **options):
        config = {
            "path": str(tmp_path / "model"),
            "dtype": "float32",
            "layout": layout,
            "gradient_checkpointing": "full",
            "optimizer": {"lr": 1e-3},
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 70},
        }
        out = str(tmp_path / (name or layout))
        return {"config": config, "out": out, "seeds": [1], "gradients": True, **options}

    one = [job("d1", routed=routed), job("d1", "own choice")]
    launch(tmp_path, [[1, one], [ranks, [job(each, routed=routed) for each in LAYOUTS[ranks]]]])
    expected = load_file(tmp_path / "d1")
    with pytest.raises(AssertionError):
        assert_gradients_close(load_file(tmp_path / "own choice"), expected, 1e-2)
    for layout in LAYOUTS[ranks]:
        assert_gradients_close(load_file(tmp_path / layout), expected, 1e-3)
        (row,) = json.loads((tmp_path / f"{layout}.json").read_text())
        assert row["routed_ratio"] == 1.0
        assert row["unrouted_sequences"] == 0.0
