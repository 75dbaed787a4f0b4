"""Recipes whose episodes have several turns, tools, or a box for code, in miniature."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.e2e.test_recipe_loops import run
from tests.integration.stack_tools import RunningStack

from areal.tokenizer import Tokenizer

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4")


def samples(stack: RunningStack, model: Path) -> list[tuple[str, str, float]]:
    """(what the loss covers, what it does not, reward) of every sample trained."""
    tokenizer, found = Tokenizer.load(model), []
    for part in sorted((stack.run_dir / "rollouts").glob("*.parquet")):
        for row in pq.read_table(part).to_pylist():
            pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
            said = tokenizer.decode([token for token, mask in pairs if mask])
            read = tokenizer.decode([token for token, mask in pairs if not mask])
            found.append((said, read, row["reward"]))
    return found


def test_multi_turn_math_when_run_then_late_answers_are_discounted_and_feedback_is_not_trained(
    tmp_path: Path,
) -> None:
    stack = RunningStack(tmp_path / "runs" / "multi-turn-math" / "demo")
    more = ("heldout_problems=20", "warm_start_loss=1.2")
    summary, rows = run(stack, tmp_path, str(EXAMPLES / "multi_turn_math.py"), *SMALL, *more)
    assert summary["status"] == "finished"
    assert [row["samples"] for row in rows] == [16, 16]
    trained = samples(stack, tmp_path / "runs/models/multi-turn-math-seed0")
    assert {round(reward, 2) for _, _, reward in trained} <= {0.0, 0.7, 1.0}
    again = [(said, read) for said, read, _ in trained if said.count("<|end|>") == 2]
    assert again, "a model that knows few sums needs second tries"
    assert all(read.count("<|user|>") == 2 for _, read in again)
    assert not any("more" in said or "less" in said for said, _, _ in trained)
