"""Families whose decoder has a name or layers of its own, on two ranks: the gradients of one."""

import pytest
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, launch
from tests.unit.areal_torch.engines.tiny_families import saved
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

pytestmark = [pytest.mark.timeout(4 * LIMIT_S), pytest.mark.filterwarnings("ignore")]
LAYOUTS = {
    "llama4_text": ["d2", "d1c2"],
    "llama4": ["d1c2"],
    "gemma3": ["d1t2", "d1c2"],
    "mistral3": ["d1t2"],
}


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradients_when_a_family_is_spread_over_ranks_then_equal_those_of_one_rank(
    tmp_path, kind, lora
):
    saved(kind, tmp_path / "model")

    def job(layout):
        config = {
            "path": str(tmp_path / "model"),
            "dtype": "float32",
            "layout": layout,
            "lora": lora,
            "gradient_checkpointing": "none",
            "optimizer": {"lr": 1e-3},
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 70},
        }
        out = str(tmp_path / layout)
        return {"config": config, "out": out, "seeds": [1], "gradients": True}

    launch(tmp_path, [[1, [job("d1")]], [2, [job(layout) for layout in LAYOUTS[kind]]]])
    one, *others = (load_file(tmp_path / layout) for layout in ["d1", *LAYOUTS[kind]])
    assert any("layers" in name and tensor.abs().sum() > 0 for name, tensor in one.items())
    for found in others:
        assert_gradients_close(found, one, 1e-3)
