"""What saves memory or time changes nothing else: recomputing, compiling, offloading (gloo)."""

import pytest
from tests.integration.test_layouts import LIMIT_S, STEPS, Runs, assert_weights_close
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

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
COMPILED = [mode for mode in MODES if mode not in EAGER]
# Number of ranks, whether it is long, (kind of model, layout) -> modes.
CASES = [
    (1, False, {("qwen3", "d1"): EAGER, ("qwen3_moe", "d1"): ["plain"]}),
    (2, False, {("qwen3", "d2"): ["plain", "inputs_on_host", "states_on_host"]}),
    (1, True, {("qwen3", "d1"): COMPILED}),
    (
        *(2, True),
        {
            ("qwen3", "d2"): ["selective", "full", *COMPILED],
            ("qwen3", "d1t2"): EAGER,
            ("qwen3", "d1c2"): EAGER,
            ("qwen3_moe", "d2e2"): EAGER,
        },
    ),
]

pytestmark = pytest.mark.timeout(4 * LIMIT_S)


def modes_of(cases):
    """(mode, kind, layout) of each case."""
    return [(mode, *case) for case, modes in cases.items() for mode in modes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Jobs of each mode, kind of model, layout and dtype."""
    folder = tmp_path_factory.mktemp("memory")
    models = {
        kind: str(make_family(kind, folder / kind, num_key_value_heads=4))
        for kind in ("qwen3", "qwen3_moe")
    }
    launches = []
    for ranks, _, cases in CASES:
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
                out = str(folder / name)
                first = {"gradients": True, "seeds": [0]} if dtype == "float32" else {}
                jobs.append({"config": config, "out": out, "seeds": STEPS, **first})
        launches.append([ranks, jobs])
    return Runs(folder, launches)


def others():
    return [
        pytest.param(*case, marks=[pytest.mark.long] * long)
        for _, long, cases in CASES
        for case in modes_of(cases)
        if case[0] != "plain" or case[2] != "d1"
    ]


@pytest.mark.parametrize(("mode", "kind", "layout"), others())
def test_first_gradients_when_memory_is_saved_then_equal_those_of_one_plain_rank(
    runs, mode, kind, layout
):
    (ours, rows) = runs[f"{mode}-{kind}-{layout}-float32"]
    (plain, rows1) = runs[f"plain-{kind}-d1-float32"]
    assert_gradients_close(ours, plain, 1e-5)
    for name in ("loss", "entropy", "n_loss_tokens", "n_tokens"):
        assert rows[0][name] == pytest.approx(rows1[0][name], rel=1e-5)


@pytest.mark.parametrize(("mode", "kind", "layout"), others())
def test_weights_when_memory_is_saved_then_equal_those_of_one_plain_rank(runs, mode, kind, layout):
    (ours, rows) = runs[f"{mode}-{kind}-{layout}-float64"]
    (plain, rows1) = runs[f"plain-{kind}-d1-float64"]
    # transformers' routers compute in float32
    assert_weights_close(ours, plain, 1e-9 if kind == "qwen3_moe" else 1e-10)
    for a, b in zip(rows, rows1, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert a[name] == pytest.approx(b[name], rel=1e-8)
