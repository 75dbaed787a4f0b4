"""Redis comes back with nothing: its volume is gone, the run's folder is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.chaos.trainer_rig import whole_run

pytestmark = pytest.mark.timeout(400)


def test_run_when_redis_lost_everything_then_it_goes_on_from_the_newest_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    incarnations = []
    for life, steps in enumerate((3, 6, 9)):
        overrides = (
            f"total_train_steps={steps}",
            "checkpoint.freq_steps=3",
            "pace_s=0.0",
            "rollout.request_timeout_s=20",
            "stack.max_restarts=0",
        )
        with whole_run(tmp_path, "lost", tiny_model, *overrides) as (rig, launcher):
            assert launcher.wait(120.0) == 0, (tmp_path / "run.log").read_text()[-3000:]
        rows = rig.rows()
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        assert max(row["staleness/max"] for row in rows) <= 2
        incarnations.append(rows[-1]["incarnation"])
        if life == 0:
            shutil.rmtree(rig.run_dir / "redis")
    first, new, after = incarnations
    # Had it counted from 1 again, its checkpoints would have passed for an abandoned branch.
    assert first < new
    assert after == new + 1
