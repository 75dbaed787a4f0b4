"""What `areal doctor` expects a trainer rank to need, against what a real one takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.stack_tools import environment


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": False},
        pytest.param({"gradient_checkpointing": "selective"}, marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16", "gradient_checkpointing": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_trainer_rank_when_it_takes_a_step_then_its_peak_is_what_was_estimated(
    tmp_path: Path, options: dict[str, object]
) -> None:
    worker = [sys.executable, "-m", "tests.integration.memory_worker"]
    ran = subprocess.run(
        [*worker, str(tmp_path), json.dumps(options)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(f"estimate over peak {found['need'] / found['peak']:.2f}: {found}")
    assert 0.75 < found["need"] / found["peak"] < 1.35, found
