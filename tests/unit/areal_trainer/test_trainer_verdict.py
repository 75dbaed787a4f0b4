"""A trainer that Kubernetes starts again in place says what it said before, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from areal.chassis.bad_input import POD_VERDICT_VARIABLE
from areal.errors import CannotStart
from areal_launch.processes.process import python_environment
from areal_trainer.job import FINAL


def test_trainer_when_its_life_before_said_what_must_be_mended_then_it_does_not_try_again(
    tmp_path: Path,
) -> None:
    verdict = tmp_path / "verdict"
    verdict.write_text("the first 16 tasks all failed with the same error: task e0-1: x (r.py:3)")
    ended = subprocess.run(
        [sys.executable, "-m", "areal_trainer", "--config", str(tmp_path / "there-is-none.yaml")],
        env={**os.environ, **python_environment(), POD_VERDICT_VARIABLE: str(verdict)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "not started again: the first 16 tasks" in ended.stderr
    assert "there-is-none" not in ended.stderr


def test_trainer_when_the_machine_lacks_what_the_error_names_then_it_ends() -> None:
    assert issubclass(CannotStart, FINAL)
