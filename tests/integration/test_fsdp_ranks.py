"""Training over several ranks (gloo): the number of ranks changes nothing but speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close
from transformers import AutoModelForCausalLM

from areal_torch.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
STEPS = list(range(6))
HALF = 3
LIMIT_S = 600

pytestmark = pytest.mark.timeout(4 * LIMIT_S + 20)


class Launches:
    """Runs jobs in as few processes as possible and holds their results: (tensors, statistics per
    step)."""

    def __init__(self, folder, model_dir):
        self.folder = folder
        self.model_dir = model_dir
        self.results = {}

    def checkpoint(self, name):
        return str(self.folder / name)

    def job(self, name, dtype="float64", seeds=STEPS, groups=7, options=None, **extra):
        config = {
            "path": str(self.model_dir),
            "dtype": dtype,
            "optimizer": {"lr": 1e-3, "lr_scheduler_type": "linear"},
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 90},
            **(options or {}),
        }
        out = str(self.folder / f"{name}.safetensors")
        return {"config": config, "seeds": seeds, "groups": groups, "out": out, **extra}

    def launch(self, *launches):
        """Run (ranks, jobs) one after the other; 0 ranks: in a process without a group."""
        path = f"{ROOT / 'services'}:{ROOT}"
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        worker = str(ROOT / "tests/integration/fsdp_worker.py")
        done = subprocess.run(
            [sys.executable, worker, str(self.folder), json.dumps(launches)],
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        for job in (job for _, jobs in launches for job in jobs):
            rows = json.loads(Path(job["out"] + ".json").read_text())
            self.results[Path(job["out"]).stem] = (load_file(job["out"]), rows)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    launches = Launches(folder, make_tiny_model(folder / "model", seed=3, hidden_size=64))
    job, checkpoint = launches.job, launches.checkpoint
    clip = {"behavior_weight_cap": 2.0, "c_clip": 3.0}
    tiny_budget = {"mb_spec": {"max_tokens_per_mb": 20}}
    alone = {"mb_spec": {"max_tokens_per_mb": 1}}
    minibatches = {"ppo_n_minibatches": 2}
    experts = {"path": str(make_family("qwen3_moe", folder / "experts", vocab_size=261))}

    def common(ranks):
        bits = {"dtype": "float32", "seeds": STEPS[:4], "options": minibatches}
        return [
            job(f"gradients-{ranks}", "float32", [0], options=clip, gradients=True),
            job(f"train-{ranks}"),
            job(f"lonely-{ranks}", seeds=[0, 1, 2], groups=1, options=tiny_budget),
            job(f"one-token-{ranks}", seeds=[0, 1], groups=1, options=alone, one_token=True),
            job(f"whole-{ranks}", **bits),
            job(
                f"saving-{ranks}",
                **bits,
                save_at=2,
                save_to=checkpoint(f"bits-{ranks}"),
                background=True,
            ),
            job(f"resumed-{ranks}", **bits, resume=checkpoint(f"bits-{ranks}")),
            # torch has no grouped_mm of float64.
            job(f"experts-{ranks}", "float32", [0], options=experts, hub=checkpoint(f"h{ranks}")),
            job(
                f"half-{ranks}",
                save_at=HALF,
                save_to=checkpoint(f"half-{ranks}"),
            ),
        ]

    launches.launch(
        (1, common(1)),
        (2, [*common(2), job("one-then-two", resume=checkpoint("half-1"))]),
        (0, [job("plain"), job("two-then-one", resume=checkpoint("half-2"))]),
    )
    return launches


def assert_weights_close(ours, expected, relative):
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((ours[name] - tensor).norm() / tensor.norm())
        assert error <= relative, f"{name} differs by {error:.2e} of its norm"


def test_gradients_when_on_two_ranks_then_equal_those_of_one(runs):
    (one, rows), (two, rows2) = runs.results["gradients-1"], runs.results["gradients-2"]
    assert_gradients_close(two, one, 1e-5)
    for name in ("loss", "entropy", "behavior_weight", "behavior_weight_max", "n_loss_tokens"):
        assert rows2[0][name] == pytest.approx(rows[0][name], rel=1e-5)


def test_weights_when_trained_on_two_ranks_then_equal_those_of_one(runs):
    (one, rows), (two, rows2) = runs.results["train-1"], runs.results["train-2"]
    assert_weights_close(two, one, 1e-10)
    start = load_file(runs.model_dir / "model.safetensors")
    moved = (one["model.embed_tokens.weight"].float() - start["model.embed_tokens.weight"]).norm()
    assert float(moved) > 0.1
    assert len(rows) == len(rows2) == len(STEPS)
    for a, b in zip(rows, rows2, strict=True):
        for name in ("loss", "grad_norm", "reward", "staleness", "staleness_max", "n_tokens", "lr"):
            assert b[name] == pytest.approx(a[name], rel=1e-8)
    # Each rank runs part of the micro-batches.
    assert rows2[0]["n_micro_batches"] < rows[0]["n_micro_batches"]


def test_weights_when_trained_without_a_group_then_equal_those_of_one_rank(runs):
    assert_weights_close(runs.results["plain"][0], runs.results["train-1"][0], 1e-10)


def test_weights_when_a_rank_has_no_sequences_then_equal_those_of_one(runs):
    (one, _), (two, rows) = runs.results["lonely-1"], runs.results["lonely-2"]
    assert_weights_close(two, one, 1e-10)
    assert rows[0]["n_micro_batches"] >= 2


def test_weights_when_a_rank_has_but_one_sequence_of_one_token_then_equal_those_of_one(runs):
    """In its forward passes for the proximal logprobs and its train steps nothing is shifted."""
    (one, rows), (two, rows2) = runs.results["one-token-1"], runs.results["one-token-2"]
    assert_weights_close(two, one, 1e-10)
    assert len(rows2) == 2
    for a, b in zip(rows, rows2, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_when_resumed_then_equals_the_uninterrupted_run_to_the_bit(runs, ranks):
    whole, rows = runs.results[f"whole-{ranks}"]
    assert len(rows) == 4
    assert len(runs.results[f"resumed-{ranks}"][1]) == 2
    assert_weights_close(runs.results[f"saving-{ranks}"][0], whole, 0.0)
    assert_weights_close(runs.results[f"resumed-{ranks}"][0], whole, 0.0)


@pytest.mark.parametrize("name", ["one-then-two", "two-then-one"])
def test_checkpoint_when_resumed_on_another_number_of_ranks_then_equals_it_too(runs, name):
    tensors, rows = runs.results[name]
    assert len(rows) == len(STEPS) - HALF
    assert_weights_close(tensors, runs.results["train-1"][0], 1e-10)


def test_weights_of_experts_when_saved_on_two_ranks_then_are_those_of_the_hub(runs):
    (one, _), (two, _) = runs.results["experts-1"], runs.results["experts-2"]
    start = load_file(runs.folder / "experts" / "model.safetensors")
    assert two.keys() == start.keys()
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert not torch.equal(two[name], start[name])
    assert_weights_close(two, one, 1e-4)
    # Rank 0 gathered them, then every rank loaded its shards of what was written.
    assert_weights_close(load_file(runs.folder / "h2" / "model.safetensors"), two, 0.0)
    fresh = AutoModelForCausalLM.from_pretrained(runs.folder / "h2")
    assert torch.equal(fresh.model.layers[1].mlp.experts.down_proj[3], two[name])
