"""Parameters that stay in float32, sharded: gradients equal those of one rank."""

import pytest
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, launch
from tests.unit.areal_torch.engines.tiny_families import saved
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

pytestmark = [
    pytest.mark.timeout(4 * LIMIT_S),
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
]
MODES = {"d1": "none", "d2": "selective", "d2s1": "full"}


@pytest.mark.parametrize("kind", ["qwen3_next", "ernie4_5_moe"])
def test_gradients_when_exact_parameters_are_sharded_then_equal_those_of_one_rank(tmp_path, kind):
    saved(kind, tmp_path / "model", scale=0.3)

    def job(layout):
        config = {
            "path": str(tmp_path / "model"),
            "dtype": "bfloat16",
            "layout": layout,
            "gradient_checkpointing": MODES[layout],
            "optimizer": {"lr": 1e-3},
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 70},
        }
        out = str(tmp_path / layout)
        return {"config": config, "out": out, "seeds": [0], "gradients": True}

    launch(tmp_path, [[1, [job("d1")]], [2, [job("d2"), job("d2s1")]]])
    one, *others = (load_file(tmp_path / layout) for layout in MODES)
    ends = {"qwen3_next": ("A_log", "dt_bias"), "ernie4_5_moe": ("gate.weight",)}[kind]
    exact = {name for name in one if name.endswith(ends)}
    assert exact
    assert all(one[name].abs().max() > 0 for name in exact)
    for found in others:
        assert_gradients_close(found, one, 0.02)  # other micro-batches: the rounding of bfloat16
        only = [{name: each[name] for name in exact} for each in (found, one)]
        assert_gradients_close(*only, 0.02)
