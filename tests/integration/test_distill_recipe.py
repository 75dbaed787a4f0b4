"""The distillation example: a student comes nearer to its teacher, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.offline_rig import Example

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize(
    "keys", [(), pytest.param(("actor.lora={}", "direction=reverse"), marks=pytest.mark.long)]
)
def test_distill_when_run_and_resumed_then_the_student_nears_its_teacher(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    few = (
        *("train_dataset.batch_size=16", "heldout_rows=16", "teacher_steps=40"),
        *(f"teacher={tmp_path}/teacher", "checkpoint.freq_steps=10", *keys),
        "actor.optimizer.lr_scheduler_type=constant",
    )
    Example("distill", tmp_path, *few, "total_train_steps=10").run()
    example = Example("distill", tmp_path, *few, "total_train_steps=20").run()
    results, rows = example.results, example.rows
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["incarnation"] for row in rows] == [1] * 10 + [2] * 10
    teacher, before, after = (
        results[f"heldout_loss_{name}"] for name in ("teacher", "before", "after")
    )
    assert teacher < before - 1, "the teacher has learned what the student is to learn"
    assert after < before
    if not keys:
        assert before - after > 0.3 * (before - teacher), results
        assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]
    assert (example.config.run_dir / "model" / "model.safetensors").is_file()
