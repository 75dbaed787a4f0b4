"""What the lives of a trainer were given, from `seen.jsonl`, and whether it was the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.trainer_rig import BATCH, TrainerProcess, TrainerRig
from tests.integration.stack_tools import eventually
from tests.kept import check_discarded, check_kept

from areal.runs.rollouts.reader import RolloutFolder


def prefilled(model: Path, steps: int) -> tuple[str, ...]:
    """Overrides: all batches fit below the staleness bound, so that they can be made before."""
    return (
        f"model.path={model}",
        f"total_train_steps={steps}",
        f"rollout.max_head_offpolicyness={steps}",
        "rollout.max_concurrent_rollouts=10000",
        "checkpoint.freq_steps=3",
    )


def batches_of(rig: TrainerRig) -> dict[tuple[int, int], tuple[list[str], bool]]:
    """(incarnation, step) to the digests of its groups, and whether every rank got to tell."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in rig.seen():
        found.setdefault((line["incarnation"], line["step"]), []).append(line)
    return {
        key: (
            sorted(group for line in lines for group in line["groups"]),
            len(lines) == lines[0]["ranks"],
        )
        for key, lines in found.items()
    }


def check_batches(rig: TrainerRig, expected: list[str], steps: int) -> int:
    """Every life, every rank: the groups of a step are those of that step. Returns replays."""
    batches = batches_of(rig)
    for (incarnation, step), (groups, whole) in batches.items():
        of_step = sorted(expected[(step - 1) * BATCH : step * BATCH])
        where = f"incarnation {incarnation}, step {step}"
        assert groups == of_step if whole else set(groups) < set(of_step), where
    assert {step for _, step in batches} == set(range(1, steps + 1))
    return len(batches) - steps


def check_replays(rig: TrainerRig, steps: int) -> int:
    """The same where the batches are not known beforehand: all incarnations agree."""
    batches = batches_of(rig)
    # The last life to take a step finished it.
    final = {step: groups for (_, step), (groups, whole) in sorted(batches.items()) if whole}
    assert set(final) == set(range(1, steps + 1))
    for (incarnation, step), (groups, whole) in batches.items():
        where = f"incarnation {incarnation}, step {step}"
        assert groups == final[step] if whole else set(groups) < set(final[step]), where
    everything = [group for groups in final.values() for group in groups]
    assert len(everything) == len(set(everything)) == steps * BATCH, "a group was trained on twice"
    return len(batches) - steps


def assert_trained_once(rig: TrainerRig, steps: int) -> None:
    """Each step has one row, every group of theirs was trained on, and none is left over."""
    assert [row["step"] for row in rig.rows()] == list(range(1, steps + 1))
    counts = rig.counts()
    assert counts["trained"] == steps * BATCH, counts
    live = ("queued", "running", "completed", "batched")
    assert not any(counts.get(state) for state in live), counts


def assert_kept_once(rig: TrainerRig, steps: int) -> None:
    """The Parquet files hold each group once: those trained on as the trainer saw them."""
    kept = check_kept(rig.run_dir, steps)
    rejected = check_discarded(RolloutFolder(rig.run_dir)).get("rejected", [])
    assert rejected == sorted(rig.rejected)
    for (incarnation, step), (groups, whole) in batches_of(rig).items():
        assert not whole or kept[step] == groups, f"incarnation {incarnation}, step {step}"


def until_steps(rig: TrainerRig, trainer: TrainerProcess, step: int) -> None:
    """Waits until a trainer has begun a step."""
    eventually(
        lambda: trainer.popen.poll() is not None or any(x["step"] >= step for x in rig.seen()),
        f"step {step}",
        120.0,
        lambda: rig.trainer_log,
    )
    assert trainer.popen.poll() is None, rig.trainer_log[-3000:]
