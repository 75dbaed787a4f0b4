"""The scale simulator in its smallest form: it runs, loses nothing, and reports how costs grow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_simulator_when_servers_grow_tenfold_then_all_are_updated_and_no_task_is_lost():
    sizes = ("3x60", "30x60", "--rate", "30")
    command = [sys.executable, "tools/scale_simulator.py", *sizes, "--seconds", "3"]
    done = subprocess.run(
        [*command, "--updates", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["servers"] for row in result["rows"]] == [3, 30]
    for row in result["rows"]:
        assert row["lost"] == 0
        assert row["episodes_per_s"] > 0
        assert row["fan_out_s"] < 120
        assert (row["expired_leases"], row["drain_left"]) == (0, 0)
    # Ten times the servers, the same work: a term of their number would show as 10.
    assert result["growth"]["servers"]["rollout_us"] < 5
