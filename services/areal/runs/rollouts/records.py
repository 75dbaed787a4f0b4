"""The columns of a kept trajectory, and a step's groups as a table of them.

| column | type | meaning |
|---|---|---|
| step | int32 | train step that used it, or whose batch was taken next; its policy: step - 1 |
| incarnation | int32 | of the trainer |
| task_id, trajectory_id | string | its group, and itself |
| sample | int32 | its place in the group |
| outcome | string | trained; or rejected, too_stale, cancelled, expired, dead_lettered |
| cause | string | why it was not trained on; null: it was |
| reward | float32 | sum of its rewards; null: the task ended without a sample |
| parts | list of {name, value: float32} | what the reward is made of, before weights |
| finish_reason | string | stop, length, … |
| completion | string | the text that its reward saw |
| turns | list of {sampled: bool, tokens: int32, text} | what was given and sampled, in order |
| input_ids | list of int32 | prompt, samples, and what a tool or environment said between them |
| loss_mask | list of bool | true on the sampled tokens that the trajectory's loss covers |
| logprobs | list of float32 | of the policy that sampled, at its temperature; 0 elsewhere |
| versions | list of int32 | the policy version that sampled each token; -1 elsewhere |
| rewards | list of float32 | where its reward came; an outcome is on the last sampled token |
| advantages | list of float32 | as the loss used them; null where a recipe changed its batch |
| split | string | which message and field of an agent's history changed; "" if none did |
| servers | list of string | URLs of the inference servers that sampled its tokens |
| generation_s | float32 | seconds that its answers took, interruptions included |
| queued_s, episode_s, score_s | float32 | its group in the queue, in the workflow, for rewards |

A file is `step-00000012-rank0.parquet`, or `step-00000012-discarded.parquet` for what was not
trained on, zstd; its metadata names the model of the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from areal.protocol.leases import Discarded
from areal.types import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    import pyarrow as pa

MODEL_KEY = b"areal.model"

FILES = "step-*-rank*.parquet"
"""A pattern of the names of files with groups that were trained on."""

DISCARDED = "step-*-discarded.parquet"
"""A pattern of the names of files with groups that were not trained on."""

TRAINED = "trained"

Decode = Callable[[Sequence[int]], str]


def file_name(step: int, rank: int) -> str:
    """Returns the name of the file with the groups that a rank trained on in a step."""
    return f"step-{step:08}-rank{rank}.parquet"


def discarded_name(step: int) -> str:
    """Returns the name of the file with what ended untrained before a step's batch was taken."""
    return f"step-{step:08}-discarded.parquet"


def step_of(name: str) -> int:
    """Returns the step in a file's name."""
    return int(name.split("-")[1])


def schema() -> pa.Schema:
    """The columns' names and types."""
    nothing = Discarded("", 0, "", "")
    return discarded_table([nothing], step=0, incarnation=0, model="", decode=None).schema


def discarded_table(
    found: Sequence[Discarded], *, step: int, incarnation: int, model: str, decode: Decode | None
) -> pa.Table:
    """Returns what was not trained on; a task without a group is a row without tokens."""
    return table_of(
        [each.group or _nothing(each) for each in found],
        step=step,
        incarnation=incarnation,
        advantages=None,
        model=model,
        decode=decode,
        ends=[(each.outcome, each.reason) for each in found],
    )


def _nothing(of: Discarded) -> TrajectoryGroup:
    none, number = np.zeros(0, np.int32), np.zeros(0, np.float32)
    name = f"{of.task_id}.{of.token}"
    return TrajectoryGroup(
        of.task_id, [Trajectory(name, none, none.astype(np.bool_), number, none, number)]
    )


def table_of(
    groups: Sequence[TrajectoryGroup],
    *,
    step: int,
    incarnation: int,
    advantages: npt.NDArray[np.float32] | None,
    model: str,
    decode: Decode | None = None,
    ends: Sequence[tuple[str, str]] = (),
) -> pa.Table:
    """Returns a step's groups as one table.

    Args:
        groups: Groups of one rank, in the order of its batch.
        step: The step that trained on them.
        incarnation: The trainer's incarnation.
        advantages: float32 [T] over all their tokens in that order, or None.
        model: The model whose tokenizer made the ids.
        decode: Ids to text; None: `turns` are null.
        ends: Outcome and cause of each group; empty: all were trained on.
    """
    import pyarrow as pa

    members = [(group, i, each) for group in groups for i, each in enumerate(group.trajectories)]
    trajectories = [each for _, _, each in members]
    ended = [end for group, end in zip(groups, ends, strict=False) for _ in group.trajectories]
    borders = np.cumsum([0, *(len(each.input_ids) for each in trajectories)], dtype=np.int32)

    # One sum for all: a call per trajectory would hold up the train loop's thread.
    tokens = np.concatenate([*(each.rewards for each in trajectories), np.zeros(1, np.float32)])
    rewards = np.add.reduceat(tokens, borders[:-1])

    def lists(arrays: Sequence[npt.NDArray[Any]]) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(borders), pa.array(np.concatenate(arrays)))

    def some(value: Callable[[Trajectory], Any], kind: pa.DataType) -> pa.Array:
        """Returns the values, with null where there is no sample."""
        return pa.array([value(t) if len(t.input_ids) else None for t in trajectories], kind)

    def seconds(value: Callable[[TrajectoryGroup], float]) -> pa.Array:
        return pa.array([value(group) for group, _, _ in members], pa.float32())

    count = len(trajectories)
    part = pa.struct([("name", pa.string()), ("value", pa.float32())])
    columns: dict[str, Any] = {
        "step": pa.array(np.full(count, step, np.int32)),
        "incarnation": pa.array(np.full(count, incarnation, np.int32)),
        "task_id": pa.array([group.task_id for group, _, _ in members], pa.string()),
        "trajectory_id": pa.array([each.trajectory_id for each in trajectories], pa.string()),
        "sample": pa.array([place for _, place, _ in members], pa.int32()),
        "outcome": pa.array([end[0] for end in ended] or [TRAINED] * count, pa.string()),
        "cause": pa.array([end[1] for end in ended], pa.string())
        if ended
        else pa.nulls(count, pa.string()),
        "reward": pa.array(rewards, mask=np.diff(borders) == 0),
        "parts": pa.array(
            [
                [{"name": name, "value": value} for name, value in each.reward_parts.items()]
                for each in trajectories
            ],
            pa.list_(part),
        ),
        "finish_reason": some(lambda each: each.finish_reason.value, pa.string()),
        "completion": some(lambda each: each.completion_text, pa.string()),
        "turns": _turns(trajectories, borders, decode),
        "input_ids": lists([each.input_ids for each in trajectories]),
        "loss_mask": lists([each.loss_mask for each in trajectories]),
        "logprobs": lists([each.behavior_logprobs for each in trajectories]),
        "versions": lists([each.token_versions for each in trajectories]),
        "rewards": lists([each.rewards for each in trajectories]),
        "advantages": pa.nulls(count, pa.list_(pa.float32())),
        "split": some(lambda each: each.split, pa.string()),
        "servers": pa.array([each.servers for each in trajectories], pa.list_(pa.string())),
        "generation_s": pa.array([each.generation_s for each in trajectories], pa.float32()),
        "queued_s": seconds(lambda group: group.queued_s),
        "episode_s": seconds(lambda group: group.episode_s),
        "score_s": seconds(lambda group: group.score_s),
    }
    if advantages is not None and len(advantages) == borders[-1]:
        columns["advantages"] = lists([advantages.astype(np.float32, copy=False)])
    return pa.table(columns, metadata={MODEL_KEY: model.encode()})


def _turns(
    trajectories: Sequence[Trajectory], borders: npt.NDArray[np.int32], decode: Decode | None
) -> pa.Array:
    """Returns each trajectory's stretches of given and of sampled tokens, with their texts."""
    import pyarrow as pa

    fields = {"sampled": pa.bool_(), "tokens": pa.int32(), "text": pa.string()}
    kind = pa.list_(pa.struct(list(fields.items())))
    if decode is None:
        return pa.nulls(len(trajectories), kind)
    mask = np.concatenate([each.loss_mask for each in trajectories])
    changes = np.flatnonzero(np.diff(mask)) + 1
    starts = np.union1d(borders[:-1][np.diff(borders) > 0], changes)
    tokens = np.diff(starts, append=len(mask))
    ids = np.concatenate([each.input_ids for each in trajectories]).tolist()
    text = cache(decode)  # a group's samples share their prompt, and short answers repeat
    texts = [
        text(tuple(ids[start : start + size]))
        for start, size in zip(starts.tolist(), tokens.tolist(), strict=True)
    ]
    columns = [mask[starts], tokens, texts]
    arrays = [pa.array(v, k) for v, k in zip(columns, fields.values(), strict=True)]
    values = pa.StructArray.from_arrays(arrays, names=list(fields))
    offsets = np.searchsorted(starts, borders)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
