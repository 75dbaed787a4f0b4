"""Images over several ranks (gloo): some ranks and micro-batches have none, the result is one."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, assert_weights_close, launch
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

pytestmark = [pytest.mark.timeout(2 * LIMIT_S), pytest.mark.long]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def runs(request, tmp_path_factory):
    """Ranks and kind of job -> (tensors, statistics per step)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = str(make_family(request.param, folder / "model"))
    jobs = {}
    for ranks in (1, 2):
        config = {
            "path": model,
            "layout": f"d{ranks}",
            "optimizer": {"lr": 1e-3, "gradient_clipping": 0.05},
            "mb_spec": {"max_tokens_per_mb": 40},
        }
        for dtype, extra in (("float32", {"gradients": True, "seeds": [0]}), ("float64", {})):
            jobs[ranks, dtype] = {
                "config": {**config, "dtype": dtype},
                "out": str(folder / f"{ranks}-{dtype}"),
                "seeds": list(range(4)),
                "images": True,
                **extra,
            }
    launch(folder, [[n, [jobs[n, "float32"], jobs[n, "float64"]]] for n in (1, 2)])
    return {
        key: (load_file(job["out"]), json.loads(Path(job["out"] + ".json").read_text()))
        for key, job in jobs.items()
    }


def test_gradients_when_ranks_share_the_groups_then_equal_those_of_one_rank(runs):
    ours, expected = runs[2, "float32"][0], runs[1, "float32"][0]
    assert_gradients_close(ours, expected, 1e-5)
    tower = [name for name in expected if "visual" in name]
    assert sum(bool(expected[name].abs().max() > 0) for name in tower) > 10
    only = [{name: each[name] for name in tower} for each in (ours, expected)]
    assert_gradients_close(*only, 1e-5)


def test_weights_when_ranks_share_the_groups_then_equal_those_of_one_rank(runs):
    assert_weights_close(runs[2, "float64"][0], runs[1, "float64"][0], 1e-10)
