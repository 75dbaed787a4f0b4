import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import InvalidInput
from areal.protocol import trajectories as wire
from areal.types import Purpose, StopReason, Task, Trajectory, TrajectoryGroup, WorkflowSpec
from areal.v1 import trajectory_pb2 as pb


def trajectory(length=5, prompt=2, version=3) -> Trajectory:
    mask = np.arange(length) >= prompt
    return Trajectory(
        trajectory_id="t/0",
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        token_versions=np.where(mask, version, -1).astype(np.int32),
        rewards=np.eye(length, dtype=np.float32)[-1],
        finish_reason=StopReason.LENGTH,
        completion_text="ab",
    )


@given(st.integers(2, 40), st.integers(0, 9))
def test_group_when_sent_and_received_then_equal(length, version):
    group = TrajectoryGroup("t", [trajectory(length, 1, version)], traceparent="00-a-b-01")
    back = wire.group_from_pb(
        pb.TrajectoryGroup.FromString(wire.group_to_pb(group).SerializeToString())
    )
    assert back.task_id == "t"
    assert back.head_version == version
    assert back.traceparent == group.traceparent
    for name in wire.TRAJECTORY_ARRAYS:
        np.testing.assert_array_equal(
            getattr(back.trajectories[0], name), getattr(group.trajectories[0], name)
        )
    assert back.trajectories[0].reward == 1.0
    assert back.trajectories[0].finish_reason is StopReason.LENGTH


def tensor_pb(array) -> pb.Tensor:
    return pb.Tensor(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())


def broken(change) -> pb.TrajectoryGroup:
    message = wire.group_to_pb(TrajectoryGroup("t", [trajectory()]))
    change({t.name: t for t in message.tensors}, message)
    return message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, m: setattr(t["rewards"].tensor, "dtype", "float16"), "float16"),
        (lambda t, m: setattr(t["rewards"].tensor, "dtype", "int32"), r"got 'int32' \[5\]"),
        (lambda t, m: t["rewards"].tensor.shape.append(1), r"expected float32\[L\]"),
        (lambda t, m: setattr(t["rewards"].tensor, "data", b"123"), "3 bytes"),
        (lambda t, m: t["rewards"].tensor.shape.__setitem__(0, -5), "length -5, expected 5"),
        (lambda t, m: setattr(t["loss_mask"], "name", "mask"), "loss_mask"),
        (lambda t, m: setattr(m.trajectories[0], "length", 4), "length 5, expected 4"),
        (lambda t, m: setattr(m.trajectories[0], "length", -5), "length -5"),
        (lambda t, m: setattr(m.trajectories[0], "finish_reason", "bored"), "bored"),
        (lambda t, m: setattr(m.trajectories[0], "reward", np.nan), "reward nan: expected a fin"),
        (lambda t, m: setattr(m.trajectories[0], "reward", -np.inf), "reward -inf: expected"),
        (
            lambda t, m: t["rewards"].tensor.CopyFrom(tensor_pb(np.full(5, np.nan, np.float32))),
            "not finite",
        ),
        (
            lambda t, m: t["rewards"].tensor.CopyFrom(tensor_pb(np.zeros(4, np.float32))),
            "length 4",
        ),
        (
            lambda t, m: t["token_versions"].tensor.CopyFrom(tensor_pb(np.full(5, -1, np.int32))),
            "token_versions",
        ),
    ],
)
def test_group_when_malformed_then_error_names_it(change, words):
    with pytest.raises(InvalidInput, match=words):
        wire.group_from_pb(broken(change))


def test_group_when_its_trajectories_differ_in_length_then_each_gets_its_own_back():
    sent = TrajectoryGroup("t", [trajectory(5), trajectory(9, version=1), trajectory(3)])
    back = wire.unpack_group(wire.pack_group(sent))
    assert back.head_version == 1
    for name in wire.TRAJECTORY_ARRAYS:
        for there, here in zip(sent.trajectories, back.trajectories, strict=True):
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))


def test_group_when_arrays_are_of_another_type_or_order_then_the_same_bytes_are_sent():
    plain, other = trajectory(5), trajectory(5)
    other.input_ids = other.input_ids.astype(np.int64)
    other.loss_mask = np.repeat(other.loss_mask, 2)[::2]
    other.behavior_logprobs = other.behavior_logprobs.tolist()
    other.token_versions = other.token_versions.astype(">i4")
    other.rewards = other.rewards.astype(np.float64)
    assert wire.pack_group(TrajectoryGroup("t", [other])) == wire.pack_group(
        TrajectoryGroup("t", [plain])
    )


def test_group_when_a_value_is_wrong_then_the_error_names_its_trajectory():
    group = TrajectoryGroup("t", [trajectory(5), trajectory(9)])
    group.trajectories[1].trajectory_id = "t/1"
    group.trajectories[1].rewards[0] = np.inf
    with pytest.raises(InvalidInput, match="'t/1' rewards: a value is not finite"):
        wire.unpack_group(wire.pack_group(group))


def test_group_when_arrays_are_not_aligned_then_refused_before_it_is_sent():
    long, short = trajectory(5), trajectory(5)
    long.rewards, short.rewards = np.zeros(6, np.float32), np.zeros(4, np.float32)
    with pytest.raises(InvalidInput, match="'t/0' rewards: length 6, expected 5"):
        wire.pack_group(TrajectoryGroup("t", [long, short]))
    square = trajectory(4)
    square.loss_mask = np.ones((4, 1), bool)
    with pytest.raises(InvalidInput, match=r"'t/0' loss_mask: length \[4, 1\], expected 4"):
        wire.pack_group(TrajectoryGroup("t", [square]))


def test_group_when_empty_then_refused():
    with pytest.raises(InvalidInput, match="no trajectories"):
        wire.group_from_pb(pb.TrajectoryGroup(task_id="g"))


def test_task_when_sent_and_received_then_equal():
    task = Task(
        task_id="e0-1",
        purpose=Purpose.TRAIN,
        workflow=WorkflowSpec("W", "abc", '{"n":1}'),
        data={"messages": [{"role": "user", "content": "ü"}], "n": 3},
        position=(0, 1),
        time_to_live_s=2.5,
        traceparent="tp",
    )
    assert wire.task_from_pb(wire.task_to_pb(task)) == task
    pinned = replace(task, purpose=Purpose.SERVE, policy_version=0)
    assert wire.task_from_pb(wire.task_to_pb(pinned)) == pinned
    for wrong in (replace(task, policy_version=3), replace(pinned, policy_version=2**21)):
        with pytest.raises(InvalidInput, match="'e0-1' policy_version"):
            wire.task_from_pb(wire.task_to_pb(wrong))


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', "1"])
def test_task_when_data_is_not_an_object_then_error_names_the_field(text):
    message = pb.Task(task_id="t", purpose=pb.PURPOSE_SERVE, data_json=text)
    with pytest.raises(InvalidInput, match="task 't' data_json"):
        wire.task_from_pb(message)


def test_task_when_purpose_is_unset_then_refused():
    with pytest.raises(InvalidInput, match="purpose"):
        wire.task_from_pb(pb.Task(task_id="t"))


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_json_when_nested_deeper_than_can_be_written_inside_a_record_then_refused():
    assert wire.parse_json_object(nested(200), "data_json")
    flat = json.dumps({"rows": [{}] * 2000})
    assert len(wire.parse_json_object(flat, "data_json")["rows"]) == 2000
    for depth in (201, 300, 1000):
        with pytest.raises(InvalidInput, match=r"^data_json: nested too deep, expected 200 levels"):
            wire.parse_json_object(nested(depth), "data_json")
