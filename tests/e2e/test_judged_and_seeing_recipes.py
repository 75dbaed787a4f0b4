"""Recipes of more than one model, or of one that sees: a judge, a teacher, a vision tower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.test_recipe_loops import run
from tests.inference_server import running_server
from tests.integration.stack_tools import RunningStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("total_train_steps=3", "train_dataset.batch_size=8", "gconfig.n_samples=4")


def test_tldr_when_run_then_answers_have_the_scores_of_the_reward_model(tmp_path: Path) -> None:
    stack = RunningStack(tmp_path / "runs" / "tldr" / "demo")
    more = ("judge_steps=20", "warm_start_steps=40", "train_posts=200", "heldout_posts=10")
    summary, rows = run(stack, tmp_path, str(EXAMPLES / "tldr.py"), *SMALL, *more)
    assert summary["status"] == "finished"
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["reward/std"] > 0 for row in rows), "different answers, different scores"
    assert rows[0]["train/grad_norm"] > 0
    assert 0.0 <= summary["heldout_after"] <= 1.0
    scored = json.loads((tmp_path / "runs/models/tldr-judge-seed0/config.json").read_text())
    assert scored["architectures"] == ["Qwen2ForSequenceClassification"]


def test_on_policy_distill_when_the_teacher_is_served_then_its_steps_are_those_of_a_folder(
    tmp_path: Path,
) -> None:
    recipe = str(EXAMPLES / "on_policy_distill.py")
    more = ("total_train_steps=8", "train_dataset.batch_size=32", "heldout_problems=10")
    more += ("warm_start_loss=2.5", "warm_start_steps=60", "rollout.max_head_offpolicyness=0")
    stack = RunningStack(tmp_path / "runs" / "on-policy-distill" / "trial0")
    summary, rows = run(stack, tmp_path, recipe, *more)
    assert summary["status"] == "finished"
    assert rows[-1]["train/loss"] < rows[0]["train/loss"], "the student nears the teacher"
    folder = tmp_path / "runs/models/on-policy-teacher-seed0"
    with running_server(folder, "--context-length", "64") as server:
        stack = RunningStack(tmp_path / "runs" / "on-policy-distill" / "served")
        keys = (*more, f"teacher={server.url}", "trial_name=served")
        summary, served = run(stack, tmp_path, recipe, *keys)
    assert summary["status"] == "finished"
    assert served[-1]["train/loss"] < served[0]["train/loss"]
    # Other answers, sampled from the same student: about the same distance at first.
    assert served[0]["train/loss"] == pytest.approx(rows[0]["train/loss"], rel=0.3)


def test_clevr_count_when_run_then_servers_and_trainer_see_the_same_and_the_tower_learns(
    tmp_path: Path,
) -> None:
    stack = RunningStack(tmp_path / "runs" / "clevr-count" / "demo")
    more = ("warm_start_loss=0.8", "train_pictures=200", "heldout_pictures=10")
    summary, rows = run(stack, tmp_path, str(EXAMPLES / "clevr_count.py"), *SMALL, *more)
    assert summary["status"] == "finished"
    assert [row["samples"] for row in rows] == [32, 32, 32]
    # A picture of 16 x 16 fills 4 tokens, of which none is counted in the loss.
    assert all(row["rollout/length_max"] <= 4 for row in rows)
    assert all(row["train/loss_tokens"] <= 4 * 32 for row in rows)
    compared = [row["mismatch/kl"] for row in rows if "mismatch/kl" in row]
    assert compared
    assert max(compared) < 1e-4, "the server computes the images that the trainer computes"
    before = load_file(tmp_path / "runs/models/clevr-count-seed0/model.safetensors")
    newest = max((stack.run_dir / "weights").glob("v*"), key=lambda f: f.stat().st_mtime)
    after = load_file(next(newest.glob("*.safetensors")))
    tower = [name for name in before if name.startswith("visual.")]
    changed = [name for name in tower if not torch.equal(before[name], after[name])]
    assert len(changed) > len(tower) // 2


def test_reasoning_gym_when_run_then_easy_questions_come_first(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    stack = RunningStack(tmp_path / "runs" / "reasoning-gym" / "demo")
    more = ("warm_start_steps=30", "train_questions=200", "heldout_questions=10")
    recipe = str(EXAMPLES / "reasoning_gym.py")
    summary, rows = run(stack, tmp_path, recipe, *SMALL, *more)
    assert summary["status"] == "finished"
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert 0.0 <= summary["heldout_before"] <= 1.0
    asked = [(row["tokens_total"] - row["train/loss_tokens"]) / row["samples"] for row in rows]
    question = "Spell this word backward (example: sun -> nus): cat"
    assert asked[0] == len(question) + 2, "words of three letters are the shortest"
    assert asked == sorted(asked)
