"""Routes on the wire: compact, aligned with their trajectory, checked."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.areal.protocol.test_wire import trajectory

from areal.errors import InvalidInput
from areal.protocol import routes
from areal.protocol import trajectories as wire
from areal.types import TrajectoryGroup
from areal.v1 import trajectory_pb2 as pb


def routes_of(tokens, experts=8, layers=3, chosen=2):
    dtype = np.uint8 if experts <= 256 else np.uint16
    rng = np.random.default_rng(tokens)
    return rng.integers(0, experts, (tokens, layers, chosen)).astype(dtype)


def group(*known, length=6):
    made = [trajectory(length) for _ in known]
    for each, value in zip(made, known, strict=True):
        each.routed_experts = value
    return TrajectoryGroup("t", made)


def sent(given):
    return [each.routed_experts for each in wire.unpack_group(wire.pack_group(given)).trajectories]


@given(st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=5), st.sampled_from([8, 500]))
def test_routes_when_sent_and_received_then_equal(counts, experts):
    known = [None if count is None else routes_of(count, experts) for count in counts]
    for found, value in zip(sent(group(*known)), known, strict=True):
        if value is None:
            assert found is None
        else:
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)


def test_routes_when_their_memory_is_in_another_order_then_they_are_sent_alike():
    value = routes_of(5)
    one, two = sent(group(np.asfortranarray(value), np.repeat(value, 2, axis=0)[::2]))
    np.testing.assert_array_equal(one, value)
    np.testing.assert_array_equal(two, value)
    np.testing.assert_array_equal(sent(group(np.asfortranarray(value)))[0], value)


def test_routes_when_one_model_needs_two_bytes_then_all_of_the_group_have_them():
    one, two = sent(group(routes_of(3), routes_of(4, experts=500)))
    assert one.dtype == two.dtype == np.uint16
    np.testing.assert_array_equal(one, routes_of(3))


@pytest.mark.parametrize(
    "second",
    [
        routes_of(3, layers=4),
        routes_of(3, chosen=1),
        routes_of(7),
        routes_of(0),
        routes_of(3, layers=0),
    ],
)
def test_routes_when_those_of_one_trajectory_cannot_be_its_own_then_it_has_none(second):
    one, two = sent(group(routes_of(3), second))
    np.testing.assert_array_equal(one, routes_of(3))
    assert two is None


@pytest.mark.parametrize(
    "value",
    [[[1]], np.zeros((2, 3), np.uint8), np.zeros((2, 3, 2), np.int64), np.zeros((2, 3, 2)), "a"],
)
def test_routes_when_a_workflow_made_something_else_then_an_error_names_them(value):
    with pytest.raises(InvalidInput, match="routed_experts"):
        wire.pack_group(group(value))


def test_routes_when_they_are_larger_than_a_group_may_be_then_its_tokens_are_sent_without(
    monkeypatch,
):
    monkeypatch.setattr(routes, "MAX_BYTES", 3 * 3 * 2)
    assert sent(group(routes_of(3)))[0] is not None
    assert sent(group(routes_of(3), routes_of(1))) == [None, None]


def change(message, name):
    tensor = next(each.tensor for each in message.tensors if each.name == routes.NAME)
    if name == "dtype":
        tensor.dtype = "float32"
    elif name == "flat":
        tensor.shape[:] = [len(tensor.data)]
    elif name == "negative":
        tensor.shape[:] = [-1, -1, 18]
    elif name == "wide":
        tensor.shape[:] = [0, 3, 1 << 40]
        tensor.data = b""
    elif name == "bytes":
        tensor.data = tensor.data[:-1]
    elif name == "count":
        message.trajectories[0].gap_tokens = 2
    elif name == "too many":
        message.trajectories[0].gap_tokens = 99
    elif name == "below":
        message.trajectories[0].gap_tokens = -1
    elif name == "no tensor":
        del message.tensors[-1]


@pytest.mark.parametrize(
    "name",
    ["dtype", "flat", "negative", "wide", "bytes", "count", "too many", "below", "no tensor"],
)
def test_routes_when_a_message_contradicts_itself_then_it_is_refused(name):
    message = wire.group_to_pb(group(routes_of(3)))
    change(message, name)
    for read in (wire.group_from_pb, wire.check_group_pb):
        with pytest.raises(InvalidInput, match="gap"):
            read(message)


def as_0_3_0_wrote_it(message, known):
    """The same group with the tensor that 0.3.0 wrote."""
    del message.tensors[-1]
    for each, value in zip(message.trajectories, known, strict=True):
        each.gap_tokens, each.routed_tokens = 0, len(value)
    message.tensors.add(name="routed_experts").tensor.CopyFrom(
        routes.tensor_of(np.concatenate(known))
    )
    return message


def test_routes_when_a_group_was_stored_by_0_3_0_then_it_is_read_and_checked():
    known = [routes_of(3), routes_of(5)]
    message = as_0_3_0_wrote_it(wire.group_to_pb(group(*known)), known)
    wire.check_group_pb(message)
    for found, value in zip(wire.group_from_pb(message).trajectories, known, strict=True):
        np.testing.assert_array_equal(found.routed_experts, value)
    message.trajectories[1].routed_tokens = 4
    for read in (wire.group_from_pb, wire.check_group_pb):
        with pytest.raises(InvalidInput, match="routed_experts: 8 tokens, expected 7"):
            read(message)


def test_routes_when_0_3_0_reads_them_then_it_finds_none():
    message = wire.group_to_pb(group(routes_of(3)))
    assert "routed_experts" not in [each.name for each in message.tensors]
    assert [each.routed_tokens for each in message.trajectories] == [0]


def test_routes_when_a_router_uses_all_experts_evenly_then_they_compress_to_seven_tenths():
    tokens, layers, chosen, experts = 512, 8, 8, 128
    even = np.random.default_rng(0).random((tokens, layers, experts)).argsort(-1)[..., :chosen]
    whole = len(wire.pack_group(group(np.sort(even).astype(np.uint8), length=tokens)))
    without = len(wire.pack_group(group(None, length=tokens)))
    assert whole - without < 0.7 * even.size


@given(st.binary(max_size=40), st.lists(st.integers(-(2**62), 2**62), max_size=4), st.text())
@example(b"", [0, 2**62, 1 << 15], "uint8")
def test_array_when_a_tensor_is_anything_then_it_is_an_array_or_refused(data, shape, dtype):
    for name in (dtype, "uint8", "uint16"):
        try:
            found = routes.array_of(pb.Tensor(dtype=name, shape=shape, data=data), "routes")
        except InvalidInput:
            continue
        assert found.ndim == 3
        assert found.nbytes == len(data)
