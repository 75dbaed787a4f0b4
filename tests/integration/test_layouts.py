"""Layouts of the trainer's ranks (gloo): how model and batch are spread changes only the speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close

ROOT = Path(__file__).parents[2]
LIMIT_S = 1200
STEPS = list(range(6))
# By number of ranks. Qwen3 has norms of its heads' queries and keys, Qwen2 biases of projections.
DENSE = {1: ["d1"], 2: ["d2", "d2s1", "d1t2", "d1c2"], 4: ["d2t2", "d2c2", "d1t2c2", "d4s2"]}
EXPERTS = {1: ["d1"], 2: ["d2", "d2e2"], 4: ["d4e2", "d2t2e2", "d2t2e4", "d2c2e2"]}
MUON = {
    1: [("qwen3", "d1"), ("qwen3_moe", "d1")],
    2: [("qwen3", "d2"), ("qwen3", "d1c2"), ("qwen3_moe", "d2"), ("qwen3_moe", "d2e2")],
    4: [("qwen3", "d2t2"), ("qwen3_moe", "d2t2e2")],
}
# Expert parallelism is turned off, then on.
RESUMED = {"qwen3": ["d4", "d2t2", "d2c2"], "qwen3_moe": ["d2t2e2", "d4", "d4e2"]}

pytestmark = pytest.mark.timeout(4 * LIMIT_S)


def launch(folder, launches):
    """Run [ranks, jobs] one after the other."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'services'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/integration/layout_worker.py"), str(folder)]
    done = subprocess.run(
        [*command, json.dumps(launches)],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


class Runs:
    """Name of a job -> (tensors, statistics per step); what is launched together runs when one of
    it is asked for.
    """

    def __init__(self, folder, launches):
        """`launches`: [ranks, jobs], …"""
        self._folder = folder
        self._of = {Path(job["out"]).name: each for each in launches for job in each[1]}
        self._results = {}

    def __getitem__(self, name):
        if name not in self._results:
            ranks, jobs = self._of[name]
            launch(self._folder, [[ranks, jobs]])
            for job in jobs:
                rows = json.loads(Path(job["out"] + ".json").read_text())
                self._results[Path(job["out"]).name] = (load_file(job["out"]), rows)
        return self._results[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All jobs, one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("layouts")
    models = {
        kind: str(make_family(kind, folder / kind, num_key_value_heads=4))
        for kind in ("qwen2", "qwen3", "qwen3_moe")
    }
    launches = []

    def job(kind, layout, dtype, muon=False, **extra):
        name = f"{kind}-{layout}-{dtype}-{'-'.join(extra)}" + ("-muon" if muon else "")
        config = {
            "path": models[kind],
            "dtype": dtype,
            "layout": layout,
            "gradient_checkpointing": False,
            "optimizer": {
                "type": "muon" if muon else "adamw",
                "lr": 1e-3,
                "gradient_clipping": 0.05,
            },
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 70},
        }
        return {"config": config, "out": str(folder / name), "seeds": STEPS, **extra}

    for ranks in (1, 2, 4):
        jobs = []
        for layout in DENSE[ranks]:
            jobs.append(job("qwen2", layout, "float32", gradients=True, seeds=[0]))
            jobs.append(job("qwen3", layout, "float32", gradients=True, seeds=[0]))
            jobs.append(job("qwen3", layout, "float64"))
        for layout in EXPERTS[ranks]:
            jobs.append(job("qwen3_moe", layout, "float32", gradients=True, seeds=[0]))
            jobs.append(job("qwen3_moe", layout, "float64"))
        for kind, layout in MUON[ranks]:
            jobs.append(job(kind, layout, "float64", muon=True))
        if ranks == 2:  # Ulysses over another kernel
            over = {"gradients": True, "seeds": [0], "kernel": "varlen"}
            jobs.append(job("qwen3", "d1c2", "float32", **over))
            jobs.append(job("qwen3", "d2", "float32", gradients=True, seeds=[0], tested=1))
            jobs.append(job("qwen3", "d2", "float32", gradients=True, seeds=[0], free=0))
        if ranks == 4:  # part of a run in one layout, the rest in others
            for kind, layouts in RESUMED.items():
                parts = [str(folder / f"{kind}-part{n}") for n in (0, 1)]
                first, then, last = (job(kind, each, "float64", resume="") for each in layouts)
                first.pop("resume")
                jobs.append({**first, "seeds": STEPS[:2], "save_to": parts[0]})
                jobs.append({**then, "seeds": STEPS[:4], "resume": parts[0], "save_to": parts[1]})
                jobs.append({**last, "resume": parts[1]})
        launches.append([ranks, jobs])
    return Runs(folder, launches)


def assert_weights_close(ours, expected, relative):
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((ours[name] - tensor).norm() / tensor.norm())
        assert error <= relative, f"{name} differs by {error:.2e} of its norm"


def others(layouts):
    """Layouts of several ranks; four share few cores, so theirs are long."""
    four = (pytest.param(layout, marks=pytest.mark.long) for layout in layouts[4])
    return [*layouts[2], *four]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("layout", others(DENSE))
def test_first_gradients_when_in_a_layout_then_equal_those_of_one_rank(runs, kind, layout):
    (ours, rows), (one, rows1) = (
        runs[f"{kind}-{each}-float32-gradients-seeds"] for each in (layout, "d1")
    )
    assert_gradients_close(ours, one, 1e-5)
    for name in ("loss", "entropy", "n_loss_tokens", "n_tokens"):
        assert rows[0][name] == pytest.approx(rows1[0][name], rel=1e-5)


def test_first_gradients_when_the_self_test_took_a_layer_away_then_equal_those_of_one_rank(runs):
    ours, _ = runs["qwen3-d2-float32-gradients-seeds-tested"]
    one, _ = runs["qwen3-d1-float32-gradients-seeds"]
    assert_gradients_close(ours, one, 1e-5)


def test_first_gradients_when_memory_is_short_then_shared_out_per_micro_batch_and_equal(runs):
    ours, rows = runs["qwen3-d2-float32-gradients-seeds-free"]
    gathered, rows1 = runs["qwen3-d2-float32-gradients-seeds"]
    assert (rows[0]["gathers"], rows1[0]["gathers"]) == (False, True)
    assert rows[0]["n_micro_batches"] > 1
    assert_gradients_close(ours, gathered, 1e-6)
    assert_gradients_close(ours, runs["qwen3-d1-float32-gradients-seeds"][0], 1e-5)


def test_first_gradients_when_tokens_are_spread_over_a_flash_kernel_then_equal_packed_attention(
    runs,
):
    ours, rows = runs["qwen3-d1c2-float32-gradients-seeds-kernel"]
    one, rows1 = runs["qwen3-d1-float32-gradients-seeds"]
    assert_gradients_close(ours, one, 1e-5)
    assert rows[0]["loss"] == pytest.approx(rows1[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("layout", others(DENSE))
def test_weights_when_trained_in_a_layout_then_equal_those_of_one_rank(runs, layout):
    (ours, rows), (one, rows1) = (runs[f"qwen3-{each}-float64-"] for each in (layout, "d1"))
    assert_weights_close(ours, one, 1e-10)
    for a, b in zip(rows, rows1, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert a[name] == pytest.approx(b[name], rel=1e-8)
    assert max(row["grad_norm"] for row in rows1) > 0.05  # clipping took part


@pytest.mark.long
@pytest.mark.parametrize(("kind", "layout"), [*MUON[2], *MUON[4]])
def test_weights_when_muon_trains_in_a_layout_then_equal_those_of_one_rank(runs, kind, layout):
    (ours, _), (one, _) = (runs[f"{kind}-{each}-float64--muon"] for each in (layout, "d1"))
    assert_weights_close(ours, one, 1e-9)


@pytest.mark.parametrize("layout", others(EXPERTS))
def test_first_gradients_of_experts_when_in_a_layout_then_equal_those_of_one_rank(runs, layout):
    (ours, _), (one, _) = (
        runs[f"qwen3_moe-{each}-float32-gradients-seeds"] for each in (layout, "d1")
    )
    assert_gradients_close(ours, one, 1e-5)


@pytest.mark.parametrize("layout", others(EXPERTS))
def test_weights_of_experts_when_trained_in_a_layout_then_equal_those_of_one_rank(runs, layout):
    (ours, rows), (one, rows1) = (runs[f"qwen3_moe-{each}-float64-"] for each in (layout, "d1"))
    assert_weights_close(ours, one, 1e-9)  # transformers' routers compute in float32
    for a, b in zip(rows, rows1, strict=True):
        for name in ("loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-8)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "relative"), [("qwen3", 1e-10), ("qwen3_moe", 1e-9)])
def test_weights_when_a_run_resumes_in_other_layouts_then_equal_those_of_one_rank(
    runs, kind, relative
):
    last = RESUMED[kind][-1]
    (ours, rows), (one, _) = runs[f"{kind}-{last}-float64-resume"], runs[f"{kind}-d1-float64-"]
    assert len(rows) == 2
    assert_weights_close(ours, one, relative)
