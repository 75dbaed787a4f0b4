from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger_support import make_group, make_task

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import InvalidInput
from areal.protocol.trajectories import group_to_pb, pack_group, task_to_pb
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal_buffer.config import BufferConfig
from areal_buffer.servicer import BufferService
from areal_buffer.validation import (
    check_group,
    check_step,
    check_task,
    check_task_id,
    check_task_ids,
)


@settings(deadline=None)
@given(st.from_regex(r"[A-Za-z0-9._:-]{1,200}", fullmatch=True))
def test_task_id_when_of_the_alphabet_then_taken(task_id: str) -> None:
    assert check_task_id(task_id) == task_id


@settings(deadline=None)
@given(
    st.text().filter(
        lambda text: any(not (c.isascii() and (c.isalnum() or c in "._:-")) for c in text)
    )
)
def test_task_id_when_anything_else_is_in_it_then_refused_in_one_line(task_id: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_task_id(task_id)
    assert "\n" not in str(caught.value)


def test_task_ids_when_one_is_twice_then_named() -> None:
    with pytest.raises(InvalidInput, match="'b' appears twice"):
        check_task_ids(["a", "b", "c", "b"])
    assert check_task_ids(["a", "b"]) == ["a", "b"]


def test_task_when_valid_then_its_bytes_are_the_message() -> None:
    message = task_to_pb(make_task("a", position=(2, 5), time_to_live_s=1.5))
    task = check_task(message)
    assert (task.position, task.time_to_live_ms) == ((2, 5), 1500)
    assert task.body == message.SerializeToString()


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_task_when_bytes_are_random_then_a_message_is_valid_or_refused(data: bytes) -> None:
    message = trajectory_pb2.Task()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    try:
        task = check_task(message)
    except InvalidInput:
        return
    assert task.task_id == message.task_id


def test_group_when_valid_then_summed_up_from_its_tokens() -> None:
    group = make_group("a", version=3, samples=2, length=6)
    group.trajectories[1].token_versions[5] = 7
    group.trajectories[1].token_versions[4] = 2
    completion = pb.Completion(lease=pb.LeaseRef(task_id="a", token=4), group=pack_group(group))
    summary = check_group(completion, 10_000)
    assert (summary.task_id, summary.token) == ("a", 4)
    assert (summary.head_version, summary.generated_tokens, summary.lengths) == (2, 8, (6, 6))
    assert summary.mean_reward == 1.0
    assert summary.payload == completion.group


def test_group_when_nothing_was_sampled_then_head_version_is_minus_one() -> None:
    group = make_group("a")
    for trajectory in group.trajectories:
        trajectory.token_versions[:] = -1
        trajectory.loss_mask[:] = False
    completion = pb.Completion(lease=pb.LeaseRef(task_id="a", token=4), group=pack_group(group))
    assert check_group(completion, 10_000).head_version == -1


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\xff\xff", "group of task 'a': not a TrajectoryGroup"),
        (b"", "task_id '': expected the task's id 'a'"),
        (pack_group(make_group("b")), "task_id 'b': expected the task's id 'a'"),
        (pack_group(make_group("a", length=1000)), r"group has \d+ bytes: at most 10000"),
        (pack_group(make_group("a", length=100))[:-1], "zstd"),
    ],
)
def test_group_when_its_bytes_are_wrong_then_refused(payload: bytes, words: str) -> None:
    completion = pb.Completion(lease=pb.LeaseRef(task_id="a", token=4), group=payload)
    with pytest.raises(InvalidInput, match=words):
        check_group(completion, 10_000)


def test_group_when_a_finish_reason_is_unknown_then_refused() -> None:
    message = group_to_pb(make_group("a"))
    message.trajectories[1].finish_reason = "tired"
    completion = pb.Completion(
        lease=pb.LeaseRef(task_id="a", token=4), group=message.SerializeToString()
    )
    with pytest.raises(InvalidInput, match=r"trajectory 'a\.1' finish_reason 'tired'"):
        check_group(completion, 10_000)


def test_config_when_read_from_the_experiment_then_in_milliseconds_and_bytes() -> None:
    experiment = build_config(
        GRPOConfig, None, ["rollout.lease_ttl_s=8", "buffer.max_memory_mb=3", "trial_name=t7"]
    )
    config = BufferConfig.from_experiment(experiment)
    assert (config.lease_ttl_ms, config.sweep_interval_ms) == (8000, 2000)
    assert config.max_memory_bytes == 3 * 1024 * 1024
    assert config.namespace == "experiment/t7"
    assert "lease_ttl_ms=8000" in config.as_lua()


def test_task_when_an_unknown_field_is_huge_then_refused_for_its_size() -> None:
    data = task_to_pb(make_task("a")).SerializeToString()
    size = 8 * 1024 * 1024
    # Field 1000, length-delimited, which no version of the message has.
    data += b"\xc2\x3e" + b"\x80\x80\x80\x04" + bytes(size)
    message = trajectory_pb2.Task.FromString(data)
    with pytest.raises(InvalidInput, match=r"'a' has \d+ bytes: at most"):
        check_task(message)


@pytest.mark.parametrize("seconds", [0, -1, 2**40, -(2**63), 2**63 - 1])
def test_task_when_time_to_live_is_out_of_range_then_refused(seconds: int) -> None:
    message = task_to_pb(make_task("a"))
    message.time_to_live.seconds = seconds
    with pytest.raises(InvalidInput, match="'a' time_to_live"):
        check_task(message)


def test_step_when_it_cannot_be_a_version_then_refused() -> None:
    assert check_step(2**21 - 1, "step", 1) == 2**21 - 1
    for step in (0, 2**21, 2**53 - 1):
        with pytest.raises(InvalidInput, match=f"step {step}: expected 1 to"):
            check_step(step, "step", 1)


class Store:
    """Keeps what would be stored."""

    def __init__(self) -> None:
        self.submitted: list[object] = []
        self.used: set[str] = set()
        self.reasons: list[str] = []

    async def submit(self, tasks: Sequence[object], **_: object) -> list[bool]:
        self.submitted += tasks
        return [True] * len(tasks)

    async def recipes_used(self, digests: Iterable[str]) -> None:
        self.used |= set(digests)

    async def cancel(self, *_: object, reason: str, **__: object) -> int:
        self.reasons.append(reason)
        return 1


def service(store: Store) -> BufferService:
    rest: Any = SimpleNamespace(limit_bytes=1)
    kept: Any = store
    return BufferService(rest, kept, rest, rest, rest, rest)


async def test_submit_when_a_client_gives_positions_then_refused_and_a_trainers_are_kept() -> None:
    store = Store()
    tasks = [task_to_pb(make_task("0:1", position=(2**31 - 1, 2**27 - 1)))]
    tasks[0].workflow.recipe_digest = "a" * 64
    request = pb.BufferServiceSubmitTasksRequest(tasks=tasks)
    context: Any = None
    with pytest.raises(InvalidInput, match="only a trainer's tasks have one"):
        await service(store).SubmitTasks(request, context)
    assert store.submitted == []
    request.incarnation = 1
    await service(store).SubmitTasks(request, context)
    assert len(store.submitted) == 1
    assert store.used == {"a" * 64}


async def test_cancel_when_the_reason_is_long_then_a_short_one_stays_with_each_record() -> None:
    store = Store()
    request = pb.BufferServiceCancelTasksRequest(task_ids=["a"], reason="why \n" * 1000)
    context: Any = None
    await service(store).CancelTasks(request, context)
    assert store.reasons == [("why " * 75)]
