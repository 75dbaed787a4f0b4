"""A run's kept rollouts against its other books."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np

from areal.runs.rollouts.reader import Kept, RolloutFolder


def check_kept(run_dir: Path, steps: int) -> dict[int, list[str]]:
    """Each group of `batches.jsonl` is there once, in the step that trained on it, and no other.

    Returns:
        By step: a digest of each of its groups, sorted, as the replay recipe makes them.
    """
    given: dict[int, list[str]] = {}
    for line in (run_dir / "batches.jsonl").read_text().splitlines():
        row = json.loads(line)
        given[row["step"]] = row["task_ids"]  # a replay is given the same ones
    assert sorted(given) == list(range(1, steps + 1))
    folder = RolloutFolder(run_dir)
    assert folder.steps == sorted(given)
    assert not list(folder.folder.glob("*.tmp"))
    kept = folder.read()
    twice = [name for name, count in Counter(k.trajectory_id for k in kept).items() if count > 1]
    assert not twice, f"kept more than once: {twice}"
    check_discarded(folder)
    digests: dict[int, list[str]] = {}
    for step, task_ids in given.items():
        groups = folder.groups(step)
        assert sorted(groups) == sorted(task_ids), f"step {step}"
        digests[step] = sorted(map(_digest, groups.values()))
    return digests


def check_discarded(folder: RolloutFolder) -> dict[str, list[str]]:
    """What was not trained on is there once, with a cause; returns the tasks by outcome."""
    found = folder.discarded()
    ends = Counter((one.trajectory_id, one.outcome) for one in found)
    twice = [name for name, count in ends.items() if count > 1]
    assert not twice, f"discarded more than once: {twice}"
    assert all(one.cause for one in found)
    trained = {one.trajectory_id for one in folder.read()}
    assert trained.isdisjoint(one.trajectory_id for one in found)
    tasks: dict[str, set[str]] = {}
    for one in found:
        tasks.setdefault(one.outcome, set()).add(one.task_id)
    return {outcome: sorted(ids) for outcome, ids in tasks.items()}


def _digest(group: list[Kept]) -> str:
    digest = hashlib.sha256()
    for one in group:
        digest.update(np.array(one.input_ids, np.int64).tobytes())
        digest.update(np.array(one.loss_mask, bool).tobytes())
        digest.update(np.array(one.logprobs, np.float32).tobytes())
        digest.update(np.array(one.versions, np.int64).tobytes())
        digest.update(np.array(one.rewards, np.float32).tobytes())
    return digest.hexdigest()[:16]
