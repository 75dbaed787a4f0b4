"""Training over several ranks (torchrun, gloo): the number of ranks changes nothing but speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.unit.areal.engines.train_fixtures import assert_gradients_close

from areal.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
STEPS = list(range(10))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, hidden_size=64)


@pytest.fixture
def train(model_dir, tmp_path):
    """Run the worker on some ranks; returns its tensors and its statistics per step."""
    count = 0

    def run(ranks, dtype="float64", seeds=STEPS, groups=7, options=None, **job):
        nonlocal count
        count += 1
        config = {
            "path": str(model_dir),
            "dtype": dtype,
            "optimizer": {"lr": 1e-3, "lr_scheduler_type": "linear"},
            "reward_norm": {"mean_level": "group", "std_level": "group"},
            "mb_spec": {"max_tokens_per_mb": 90},
            "distributed_timeout_seconds": 60,
            **(options or {}),
        }
        out = str(tmp_path / f"run{count}.safetensors")
        job |= {"config": config, "seeds": seeds, "groups": groups, "out": out}
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'services'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(ROOT / "tests/integration/fsdp_worker.py"), json.dumps(job)]
        if ranks > 0:  # 0: a plain process, without torchrun
            command[1:1] = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={ranks}",
            ]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return load_file(out), json.loads(Path(out + ".json").read_text())

    return run


def assert_weights_close(ours, expected, relative):
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((ours[name] - tensor).norm() / tensor.norm())
        assert error <= relative, f"{name} differs by {error:.2e} of its norm"


def test_gradients_when_on_two_ranks_then_equal_those_of_one(train):
    options = {"behavior_weight_cap": 2.0, "c_clip": 3.0}
    one, rows = train(1, "float32", [0], gradients=True, options=options)
    two, rows2 = train(2, "float32", [0], gradients=True, options=options)
    assert_gradients_close(two, one, 1e-5)
    for name in ("loss", "entropy", "behavior_weight", "behavior_weight_max", "n_loss_tokens"):
        assert rows2[0][name] == pytest.approx(rows[0][name], rel=1e-5)


def test_weights_when_trained_on_two_ranks_then_equal_those_of_one(train, model_dir):
    one, rows = train(1)
    two, rows2 = train(2)
    plain, _ = train(0)
    assert_weights_close(two, one, 1e-10)
    assert_weights_close(plain, one, 1e-10)
    start = load_file(model_dir / "model.safetensors")
    moved = (one["model.embed_tokens.weight"].float() - start["model.embed_tokens.weight"]).norm()
    assert float(moved) > 0.1
    for a, b in zip(rows, rows2, strict=True):
        for name in ("loss", "grad_norm", "reward", "staleness", "staleness_max", "n_tokens", "lr"):
            assert b[name] == pytest.approx(a[name], rel=1e-8)
    # Ranks with different amounts of work ran the same number of micro-batches.
    assert rows2[0]["n_micro_batches"] < rows[0]["n_micro_batches"]


def test_weights_when_a_rank_has_no_sequences_then_equal_those_of_one(train):
    options = {"mb_spec": {"max_tokens_per_mb": 20}}
    one, _ = train(1, seeds=[0, 1, 2], groups=1, options=options)
    two, rows = train(2, seeds=[0, 1, 2], groups=1, options=options)
    assert_weights_close(two, one, 1e-10)
    assert rows[0]["n_micro_batches"] >= 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_when_resumed_then_equals_the_uninterrupted_run(train, tmp_path, ranks):
    options = {"ppo_n_minibatches": 2}
    whole, _ = train(ranks, "float32", seeds=STEPS[:5], options=options)
    train(
        ranks,
        "float32",
        seeds=STEPS[:5],
        options=options,
        save_at=2,
        save_to=str(tmp_path / "c"),
        background=True,
    )
    resumed, _ = train(
        ranks, "float32", seeds=STEPS[:5], options=options, resume=str(tmp_path / "c")
    )
    assert_weights_close(resumed, whole, 0.0)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_checkpoint_when_resumed_on_another_number_of_ranks_then_equals_it_too(
    train, tmp_path, first, then
):
    whole, _ = train(1, seeds=STEPS[:6])
    train(first, seeds=STEPS[:3], save_at=3, save_to=str(tmp_path / "c"))
    resumed, _ = train(then, seeds=STEPS[:6], resume=str(tmp_path / "c"))
    assert_weights_close(resumed, whole, 1e-10)
