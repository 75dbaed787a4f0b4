"""The groups of a layout: each has a deadline, and names the ranks that did not come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "mesh_worker.py"


def ranks(tmp_path: Path, absent: int) -> dict[str, Any]:
    command = [sys.executable, str(WORKER), str(tmp_path / "meet"), str(absent)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_mesh_when_all_ranks_come_then_each_group_has_the_deadline(tmp_path: Path) -> None:
    found = ranks(tmp_path, -1)
    assert [each["limits_s"] for each in found.values()] == [[3.0] * 3] * 4
    assert {rank: each["sums"] for rank, each in found.items()} == {
        "0": [2.0, 2.0, 1.0],
        "1": [4.0, 4.0, 1.0],
        "2": [2.0, 2.0, 5.0],
        "3": [4.0, 4.0, 5.0],
    }


def test_mesh_when_a_rank_does_not_come_then_its_group_says_whom_it_waited_for(
    tmp_path: Path,
) -> None:
    found = ranks(tmp_path, 3)
    # Groups are made in the same order everywhere: rank 1 meets the absent one first.
    assert "for the other ranks of the group 'shard' on ranks [3]" in found["1"]["error"]
    assert "deadline 3 s" in found["1"]["error"]
    assert all("\n" not in each.get("error", "") for each in found.values())
