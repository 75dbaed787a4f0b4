"""The columns of a kept trajectory, and a step's groups as a table of them.

| column | type | meaning |
|---|---|---|
| step | int32 | train step that used it; its policy had the version step - 1 |
| incarnation | int32 | of the trainer |
| task_id, trajectory_id | string | its group, and itself |
| sample | int32 | its place in the group |
| reward | float32 | sum of its rewards |
| parts | list of {name, value: float32} | what the reward is made of, before weights |
| finish_reason | string | stop, length, … |
| completion | string | the text that its reward saw |
| input_ids | list of int32 | prompt, samples, and what a tool or environment said between them |
| loss_mask | list of bool | true where the policy sampled the token |
| logprobs | list of float32 | of the policy that sampled, at its temperature; 0 elsewhere |
| versions | list of int32 | the policy version that sampled each token; -1 elsewhere |
| rewards | list of float32 | where its reward came; an outcome is on the last sampled token |
| advantages | list of float32 | as the loss used them; null where a recipe changed its batch |

A file is `step-00000012-rank0.parquet`, zstd; its metadata names the model of the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from areal.types import TrajectoryGroup

if TYPE_CHECKING:
    import pyarrow as pa

MODEL_KEY = b"areal.model"


FILES = "step-*-rank*.parquet"
"""A pattern of their names."""


def file_name(step: int, rank: int) -> str:
    """Returns the name of the file with the groups that a rank trained on in a step."""
    return f"step-{step:08}-rank{rank}.parquet"


def step_of(path: Path) -> int:
    """Returns the step in a file's name."""
    return int(path.name.split("-")[1])


def table_of(
    groups: Sequence[TrajectoryGroup],
    *,
    step: int,
    incarnation: int,
    advantages: npt.NDArray[np.float32] | None,
    model: str,
) -> pa.Table:
    """Returns a step's groups as one table.

    Args:
        groups: Groups of one rank, in the order of its batch.
        step: The step that trained on them.
        incarnation: The trainer's incarnation.
        advantages: float32 [T] over all their tokens in that order, or None.
        model: The model whose tokenizer made the ids.
    """
    import pyarrow as pa

    members = [(group.task_id, i, t) for group in groups for i, t in enumerate(group.trajectories)]
    trajectories = [trajectory for _, _, trajectory in members]
    ends = np.cumsum([0, *(len(each.input_ids) for each in trajectories)], dtype=np.int32)

    def lists(arrays: Sequence[npt.NDArray[Any]]) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(arrays)))

    count = len(trajectories)
    columns: dict[str, Any] = {
        "step": pa.array(np.full(count, step, np.int32)),
        "incarnation": pa.array(np.full(count, incarnation, np.int32)),
        "task_id": pa.array([task for task, _, _ in members], pa.string()),
        "trajectory_id": pa.array([each.trajectory_id for each in trajectories], pa.string()),
        "sample": pa.array([place for _, place, _ in members], pa.int32()),
        "reward": pa.array([each.reward for each in trajectories], pa.float32()),
        "parts": pa.array(
            [
                [{"name": name, "value": value} for name, value in each.reward_parts.items()]
                for each in trajectories
            ],
            pa.list_(pa.struct([("name", pa.string()), ("value", pa.float32())])),
        ),
        "finish_reason": pa.array([each.finish_reason.value for each in trajectories], pa.string()),
        "completion": pa.array([each.completion_text for each in trajectories], pa.string()),
        "input_ids": lists([each.input_ids for each in trajectories]),
        "loss_mask": lists([each.loss_mask for each in trajectories]),
        "logprobs": lists([each.behavior_logprobs for each in trajectories]),
        "versions": lists([each.token_versions for each in trajectories]),
        "rewards": lists([each.rewards for each in trajectories]),
        "advantages": pa.nulls(count, pa.list_(pa.float32())),
    }
    if advantages is not None and len(advantages) == ends[-1]:
        columns["advantages"] = lists([advantages.astype(np.float32, copy=False)])
    return pa.table(columns, metadata={MODEL_KEY: model.encode()})
