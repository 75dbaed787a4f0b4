"""Signs that a run cannot learn: each on a run with that fault, and none on healthy runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.config.experiment import GRPOConfig, build_config, cautions
from areal.config.learning_rules import PAGE, RULES, of_config, of_rows
from areal.config.presets import PRESETS

CURVES = Path(__file__).resolve().parents[4] / "docs" / "learning.jsonl"
GROUPED = {"group", "leave1out"}

Rows = list[dict[str, Any]]


def configured(*overrides: str) -> GRPOConfig:
    return build_config(GRPOConfig, None, ["gconfig.max_new_tokens=10", *overrides])


def run(steps: int, seed: int = 0, **columns: Callable[[int], float] | float) -> Rows:
    """Rows of a run that learns from 0.3 to 0.95, in which `columns` are replaced."""
    noise = random.Random(seed)

    def row(step: int) -> dict[str, Any]:
        reward = 0.3 + 0.65 * step / steps
        return {
            "groups": 16,
            "samples": 128,
            "reward/mean": min(1.0, max(0.0, reward + noise.gauss(0, 0.05))),
            "reward/lowest": 0.0,
            "reward/highest": 1.0,
            "group/zero_std": min(1.0, reward**8 + (1 - reward) ** 8 + noise.random() / 20),
            "train/loss": 0.01,
            "train/advantage_abs": max(0.05, 0.8 * (1 - reward**8)),
            "rollout/truncated": 0.05,
            "rollout/length_max": 8,
            "policy/entropy": 1.2 * (1 - 0.97 * step / steps),
            "policy/clip_ratio": 0.02,
            "policy/behavior_weight": 1 + noise.gauss(0, 0.05),
            "policy/behavior_weight_capped": 0.01,
            "mismatch/kl": 1e-4,
        }

    return [
        {"step": step}
        | row(step)
        | {key: value(step) if callable(value) else value for key, value in columns.items()}
        for step in range(1, steps + 1)
    ]


def named(rows: Rows) -> list[str]:
    return [finding.rule for finding in of_rows(rows)]


EQUAL = {"group/zero_std": 1.0, "train/advantage_abs": 0.0}
FLAT = {"reward/mean": 0.3}
IDLE = [
    {key: value for key, value in row.items() if not key.startswith(("train/", "policy/"))}
    for row in run(30)
]
FAULTY: dict[str, Rows] = {
    "no_update": IDLE[:2],
    "one_sample_per_group": run(2, **EQUAL, **FLAT, samples=16),
    "equal_rewards": run(
        12, **EQUAL, **{"reward/mean": 0.5, "reward/lowest": 0.5, "reward/highest": 0.5}
    ),
    "no_advantage": run(1, **EQUAL, **{"reward/mean": 0.0, "reward/highest": 0.0}),
    "answers_cut_off": run(12, **FLAT, **{"rollout/truncated": 0.6}),
    "reward_collapsed": run(40, **{"reward/mean": lambda step: 0.1 * (step < 21)}),
    "entropy_collapsed": run(
        60, **FLAT, **{"policy/entropy": lambda step: 1.0 if step < 25 else 0.01}
    ),
    "ratios_far_off": run(12, **{"policy/clip_ratio": 0.6}),
    "logprob_mismatch": run(1, **{"mismatch/kl": 0.4}),
}


def test_rules_when_listed_then_each_one_over_rows_has_a_faulty_run_here() -> None:
    assert set(FAULTY) == {rule.name for rule in RULES if rule.rows}
    assert {rule.name for rule in RULES} - set(FAULTY) == {"learning_rate"}


@pytest.mark.parametrize("name", FAULTY)
def test_rows_when_a_run_has_one_fault_then_that_rule_alone_names_it(name: str) -> None:
    (finding,) = of_rows(FAULTY[name])
    assert finding.rule == name
    assert finding.seen
    assert finding.advice
    assert "\n" not in str(finding)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("steps", [1, 5, 12, 30, 100, 400])
def test_rows_when_a_run_learns_then_no_line_after_any_step(seed: int, steps: int) -> None:
    rows = run(steps, seed)
    for upto in {*range(0, steps, max(1, steps // 40)), steps}:
        assert named(rows[:upto]) == []


LOSSES = ("dpo", "reward-", "gsm8k-sft", "distill")
"""Recorded runs whose curve is a loss."""


def test_rows_when_recorded_runs_are_replayed_then_only_those_that_fell_are_named() -> None:
    """Controls have shuffled rewards; one run fell to a tenth and recovered."""
    recovered = set()
    for line in CURVES.read_text().splitlines():
        record = json.loads(line)
        if record["row"].startswith(LOSSES):
            continue
        rows = [{"step": s, "reward/mean": m} for s, m in enumerate(record.get("curve", []), 1)]
        found = {name for upto in range(len(rows) + 1) for name in named(rows[:upto])}
        if not record["row"].endswith("control"):
            assert named(rows) == [], record["row"]
            recovered |= {record["row"]} if found else set()
        if record["row"] == "control":
            assert named(rows) == ["reward_collapsed"], record["seed"]
    assert recovered == {"tool-calculator"}


@pytest.mark.parametrize("seed", range(20))
def test_rows_when_rewards_are_rare_and_noisy_then_no_line_calls_it_a_collapse(seed: int) -> None:
    """One answer in 200 is right, all the time."""
    noise = random.Random(seed)
    rewards = [sum(noise.random() < 0.005 for _ in range(128)) / 128 for _ in range(1000)]
    rows = run(1000, **{"reward/mean": lambda step: rewards[step - 1]})
    for row in rows:
        row["group/zero_std"], row["train/advantage_abs"] = 0.7, 0.1
        row["policy/entropy"] = 1.0
    assert [name for upto in range(0, 1000, 10) for name in named(rows[:upto])] == []


def test_rows_when_the_task_is_solved_then_equal_rewards_are_no_fault() -> None:
    rows = run(60, **{"reward/mean": 0.97, "group/zero_std": 0.95})
    rows[-1] |= {"train/advantage_abs": 0.0, "group/zero_std": 1.0}
    assert named(rows) == []


def test_rows_when_rewards_are_compared_across_groups_then_equal_ones_are_no_fault() -> None:
    """Each prompt has one reward, and the batch's spread gives the gradient."""
    assert named(run(30, **FLAT, **{"group/zero_std": 1.0, "train/advantage_abs": 0.8})) == []


def test_rows_when_a_step_in_the_past_had_no_advantage_then_the_line_ends_with_the_window() -> None:
    rows = run(40)
    rows[4]["train/advantage_abs"] = 0.0
    assert named(rows[:5]) == ["no_advantage"]
    assert "step 5" in str(of_rows(rows[:5])[0])
    assert named(rows) == []


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_rows_when_nothing_was_ever_updated_then_named_with_the_steps(steps: int) -> None:
    (finding,) = of_rows(IDLE[:steps])
    first = max(1, steps - 19)
    said = "step 1" if steps == 1 else f"steps {first} to {steps}"
    assert str(finding).startswith(f"{said}: a batch was taken, but the policy was not updated")
    assert "ppo_update" in finding.advice


def test_rows_when_some_steps_are_left_out_or_warm_a_critic_up_then_no_line() -> None:
    """A recipe may skip a batch that teaches nothing."""
    assert named(IDLE[:19] + run(20)[19:]) == []
    assert named([{**row, "critic/loss": 1.0, "critic/warmup": 1.0} for row in IDLE]) == []
    forgotten = [{**row, "critic/loss": 1.0, "critic/warmup": 0.0} for row in IDLE]
    assert named(forgotten) == ["no_update"]
    own_optimizer = [{**row, "own/loss": 0.2} for row in IDLE]
    assert named(own_optimizer) == []
    gradient_not_finite = [{**row, "train/loss": None} for row in IDLE]
    assert named(gradient_not_finite) == []


def test_rows_when_only_dataset_rows_are_trained_on_then_no_line() -> None:
    rows = [{"step": s, "train/loss": 1 / s, "train/lr": 1e-3} for s in range(1, 60)]
    assert named(rows) == []


ANY = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.integers())
KEYS = st.sampled_from([*run(1)[0], "train/loss"])


@given(st.lists(st.dictionaries(KEYS, ANY), max_size=60))
def test_rows_when_values_are_anything_then_nothing_is_raised(rows: Rows) -> None:
    numbered = [{**row, "step": step} for step, row in enumerate(rows, 1)]
    for finding in of_rows(numbered):
        assert "nan" not in finding.seen


@pytest.mark.parametrize("algorithm", PRESETS)
def test_cautions_when_groups_have_one_sample_then_named_where_they_are_compared(
    algorithm: str,
) -> None:
    alone = configured(f"algorithm={algorithm}")
    compared = (alone.actor.reward_norm or "").split("/")[0] in GROUPED
    assert [finding.rule for finding in of_config(alone)] == ["one_sample_per_group"] * compared
    assert len(cautions(alone)) == compared
    assert of_config(configured(f"algorithm={algorithm}", "gconfig.n_samples=2")) == []


def test_cautions_when_the_recipe_computes_no_advantages_then_one_sample_is_fine(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "r.py"
    recipe.write_text("def main(argv): ...\n")
    assert of_config(configured(f"recipe={recipe}")) == []
    assert of_config(configured("allocation_mode=fsdp:d1")) == []
    recipe.write_text("def main(argv):\n    actor.compute_advantages(batch)\n")
    assert "gconfig.n_samples 1: expected 2" in str(of_config(configured(f"recipe={recipe}"))[0])
    recipe.write_text(recipe.read_text() + "MINE = dict(n_samples=4)\n")
    assert of_config(configured(f"recipe={recipe}")) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["actor.optimizer.lr=30"], "actor.optimizer.lr 30"),
        (["actor.optimizer.lr=0.011"], "actor.optimizer.lr 0.011"),
        (["actor.optimizer.lr=0"], "actor.optimizer.lr 0"),
        (["critic.lr=1"], "critic.lr 1"),
        (["actor.lora={}", "actor.optimizer.lr=0.2"], "actor.optimizer.lr 0.2"),
        (["actor.lora={}", "actor.optimizer.lr=0.05"], ""),
        (["actor.optimizer.lr=0.01"], ""),
        (["actor.optimizer=null"], ""),
        (["allocation_mode=fsdp:d1", "actor.optimizer.lr=30"], "actor.optimizer.lr 30"),
    ],
)
def test_cautions_when_a_learning_rate_cannot_be_right_then_named(
    overrides: list[str], key: str
) -> None:
    found = of_config(configured("gconfig.n_samples=4", *overrides))
    assert [f.rule for f in found] == ["learning_rate"] * bool(key)
    assert not key or found[0].seen.startswith(f"{key}: ")


def test_figures_when_not_finite_then_they_count_as_missing() -> None:
    rows = run(30, **FLAT, **{"rollout/truncated": math.nan, "mismatch/kl": math.inf})
    assert named(rows) == []


def test_page_when_generated_then_it_has_each_rule() -> None:
    page = (CURVES.parents[1] / PAGE).read_text()
    for rule in RULES:
        assert f"| `{rule.name}` | {rule.shown_when}. | {rule.advice} |" in page
