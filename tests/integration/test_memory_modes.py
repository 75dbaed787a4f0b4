"""What saves memory or time changes nothing else: recomputing, compiling, offloading (gloo)."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, STEPS, assert_weights_close, launch
from tests.unit.areal.engines.hub_families import make_family
from tests.unit.areal.engines.train_fixtures import assert_gradients_close

MODES = {
    "plain": {},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": True},
    "inputs_on_host": {"gradient_checkpointing": "offload"},
    "states_on_host": {"offload": True},
    "compiled": {"kernels": "compile"},
    "compiled_again": {"kernels": "compile", "gradient_checkpointing": True},
}
LAYOUTS = {1: "d1", 2: "d2"}

pytestmark = pytest.mark.timeout(4 * LIMIT_S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(mode, ranks, dtype) -> (tensors, statistics per step)."""
    folder = tmp_path_factory.mktemp("memory")
    model = str(make_family("qwen3", folder / "qwen3", num_key_value_heads=4))
    names, launches = {}, []
    for ranks, layout in LAYOUTS.items():
        jobs = []
        for mode, options in MODES.items():
            for dtype in ("float32", "float64"):
                config = {
                    "path": model,
                    "dtype": dtype,
                    "layout": layout,
                    "optimizer": {"lr": 1e-3, "gradient_clipping": 0.05},
                    "reward_norm": "group/group",
                    "mb_spec": {"max_tokens_per_mb": 70},
                    **options,
                }
                out = names[mode, ranks, dtype] = str(folder / f"{mode}-{ranks}-{dtype}")
                first = {"gradients": True, "seeds": [0]} if dtype == "float32" else {}
                jobs.append({"config": config, "out": out, "seeds": STEPS, **first})
        launches.append([ranks, jobs])
    launch(folder, launches)
    return {
        key: (load_file(out), json.loads(Path(out + ".json").read_text()))
        for key, out in names.items()
    }


def others():
    return [(mode, ranks) for mode in MODES for ranks in LAYOUTS if (mode, ranks) != ("plain", 1)]


@pytest.mark.parametrize(("mode", "ranks"), others())
def test_first_gradients_when_memory_is_saved_then_equal_those_of_one_plain_rank(runs, mode, ranks):
    (ours, rows), (plain, rows1) = runs[mode, ranks, "float32"], runs["plain", 1, "float32"]
    assert_gradients_close(ours, plain, 1e-5)
    for name in ("loss", "entropy", "n_loss_tokens", "n_tokens"):
        assert rows[0][name] == pytest.approx(rows1[0][name], rel=1e-5)


@pytest.mark.parametrize(("mode", "ranks"), others())
def test_weights_when_memory_is_saved_then_equal_those_of_one_plain_rank(runs, mode, ranks):
    (ours, rows), (plain, rows1) = runs[mode, ranks, "float64"], runs["plain", 1, "float64"]
    assert_weights_close(ours, plain, 1e-10)
    for a, b in zip(rows, rows1, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert a[name] == pytest.approx(b[name], rel=1e-8)
