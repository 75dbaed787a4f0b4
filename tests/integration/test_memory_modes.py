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
EAGER = [mode for mode in MODES if not mode.startswith("compiled")]
# By number of ranks: (kind of model, layout) -> modes.
CASES = {
    1: {("qwen3", "d1"): list(MODES), ("qwen3_moe", "d1"): ["plain"]},
    2: {
        ("qwen3", "d2"): list(MODES),
        ("qwen3", "d1t2"): EAGER,
        ("qwen3", "d1c2"): EAGER,
        ("qwen3_moe", "d2e2"): EAGER,
    },
}

pytestmark = pytest.mark.timeout(4 * LIMIT_S)


def modes_of(cases):
    """(mode, kind, layout) of each case."""
    return [(mode, *case) for case, modes in cases.items() for mode in modes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(mode, kind, layout, dtype) -> (tensors, statistics per step)."""
    folder = tmp_path_factory.mktemp("memory")
    models = {
        kind: str(make_family(kind, folder / kind, num_key_value_heads=4))
        for kind in ("qwen3", "qwen3_moe")
    }
    names, launches = {}, []
    for ranks, cases in CASES.items():
        jobs = []
        for mode, kind, layout in modes_of(cases):
            for dtype in ("float32", "float64"):
                config = {
                    "path": models[kind],
                    "dtype": dtype,
                    "layout": layout,
                    "optimizer": {"lr": 1e-3, "gradient_clipping": 0.05},
                    "reward_norm": "group/group",
                    "mb_spec": {"max_tokens_per_mb": 70},
                    **MODES[mode],
                }
                name = f"{mode}-{kind}-{layout}-{dtype}"
                out = names[mode, kind, layout, dtype] = str(folder / name)
                first = {"gradients": True, "seeds": [0]} if dtype == "float32" else {}
                jobs.append({"config": config, "out": out, "seeds": STEPS, **first})
        launches.append([ranks, jobs])
    launch(folder, launches)
    return {
        key: (load_file(out), json.loads(Path(out + ".json").read_text()))
        for key, out in names.items()
    }


def others():
    every = [case for cases in CASES.values() for case in modes_of(cases)]
    return [case for case in every if case[0] != "plain" or case[2] != "d1"]


@pytest.mark.parametrize(("mode", "kind", "layout"), others())
def test_first_gradients_when_memory_is_saved_then_equal_those_of_one_plain_rank(
    runs, mode, kind, layout
):
    (ours, rows) = runs[mode, kind, layout, "float32"]
    (plain, rows1) = runs["plain", kind, "d1", "float32"]
    assert_gradients_close(ours, plain, 1e-5)
    for name in ("loss", "entropy", "n_loss_tokens", "n_tokens"):
        assert rows[0][name] == pytest.approx(rows1[0][name], rel=1e-5)


@pytest.mark.parametrize(("mode", "kind", "layout"), others())
def test_weights_when_memory_is_saved_then_equal_those_of_one_plain_rank(runs, mode, kind, layout):
    (ours, rows) = runs[mode, kind, layout, "float64"]
    (plain, rows1) = runs["plain", kind, "d1", "float64"]
    # transformers' routers compute in float32
    assert_weights_close(ours, plain, 1e-9 if kind == "qwen3_moe" else 1e-10)
    for a, b in zip(rows, rows1, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert a[name] == pytest.approx(b[name], rel=1e-8)
