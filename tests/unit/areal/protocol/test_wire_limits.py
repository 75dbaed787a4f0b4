"""Messages whose arrays, JSON or versions are almost right."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from tests.ledger_support import make_group

from areal.errors import InvalidInput
from areal.protocol.trajectories import (
    group_from_pb,
    group_to_pb,
    pack_group,
    parse_json_object,
    unpack_group,
)
from areal.protocol.versions import (
    offer_from_pb,
    offer_to_pb,
    server_from_pb,
    status_from_pb,
    status_to_pb,
    version_from_pb,
    version_to_pb,
)
from areal.v1 import policy_pb2, weight_sync_service_pb2
from areal.weights.broadcast import Offer
from areal.weights.manifest import DeltaFile, PolicyVersion, WeightFile, WeightTensor
from areal.weights.servers import ServerState, SyncStatus


@pytest.mark.parametrize("name", ["behavior_logprobs", "rewards"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_group_when_one_value_is_not_finite_then_the_error_names_array_and_trajectory(
    name: str, value: float
) -> None:
    group = make_group("a", samples=3)
    getattr(group.trajectories[1], name)[0] = value
    with pytest.raises(InvalidInput, match=f"^trajectory 'a.1' {name}: a value is not finite"):
        unpack_group(pack_group(group))


def test_group_when_a_token_of_the_loss_has_a_version_below_zero_then_refused() -> None:
    group = make_group("a")
    group.trajectories[1].token_versions[3] = -1
    with pytest.raises(InvalidInput, match=r"^trajectory 'a\.1': token_versions must be >= 0"):
        unpack_group(pack_group(group))
    group.trajectories[1].loss_mask[3] = False  # not sampled, and not trained on
    assert unpack_group(pack_group(group)).head_version == 0


@pytest.mark.parametrize("more", [-4, 4, 1])
def test_group_when_an_array_has_other_than_its_bytes_then_refused(more: int) -> None:
    message = group_to_pb(make_group("a", samples=2, length=6))
    tensor = next(t.tensor for t in message.tensors if t.name == "rewards")
    tensor.data = (tensor.data + bytes(4))[: 48 + more]
    with pytest.raises(InvalidInput, match=rf"rewards\.data has {48 + more} bytes: expected 48"):
        group_from_pb(message)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_json_when_nested_too_deep_in_lists_or_objects_then_refused(begin: str, end: str) -> None:
    def nested(depth: int) -> str:
        return '{"rows":' + begin * (depth - 1) + "1" + end * (depth - 1) + "}"

    assert "rows" in parse_json_object(nested(200), "data_json")
    with pytest.raises(InvalidInput, match="data_json: nested too deep"):
        parse_json_object(nested(201), "data_json")


VERSION = PolicyVersion(
    version=3,
    incarnation=2**53 - 1,
    path="/weights/3",
    files=(WeightFile("a.safetensors", 7, "d1"),),
    tensors=(WeightTensor("w", (2, 3), "BF16", "d2"),),
    delta=DeltaFile("/weights/2", "of the base", 5, "of the delta"),
    publish_time=12.5,
)


def test_version_when_sent_then_whole_and_in_a_status_without_its_manifest() -> None:
    assert version_from_pb(version_to_pb(VERSION)) == VERSION
    brief = version_from_pb(version_to_pb(VERSION, with_manifest=False))
    assert (brief.version, brief.path, brief.files, brief.tensors) == (3, "/weights/3", (), ())
    with pytest.raises(InvalidInput, match=r"version\.path '': expected a model directory"):
        version_from_pb(policy_pb2.PolicyVersion(version=1))


def test_status_when_sent_then_every_field_arrives() -> None:
    brief = version_from_pb(version_to_pb(VERSION, with_manifest=False))
    status = SyncStatus(VERSION, 2, 5, 3, 11, 0.25, 13, 1, unstored=True)
    # Each field has a value of its own: none can stand for another or for its default.
    sent = [getattr(status, field.name) for field in fields(SyncStatus)][1:]
    assert not {0} & set(sent[:-1])
    back = status_from_pb(status_to_pb(status))
    assert back.current == brief
    assert [getattr(back, field.name) for field in fields(SyncStatus)][1:] == sent
    assert status_from_pb(status_to_pb(SyncStatus(None))) == SyncStatus(None, confirmed_version=-1)


def test_server_when_its_state_is_of_a_newer_protocol_then_it_gets_no_traffic() -> None:
    message = policy_pb2.InferenceServer(server_id="s", url="http://s:1")
    message.state = 77  # type: ignore[assignment]
    assert server_from_pb(message).state is ServerState.QUARANTINED


def test_offer_when_sent_then_equal() -> None:
    offer = Offer("10.0.0.3", 65535, "nccl", "kept")
    assert offer_from_pb(offer_to_pb(offer)) == offer


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("address", "", "offer.address '': expected the trainer's host"),
        ("port", 0, "offer.port 0: expected 1 to 65535"),
        ("port", 65536, "offer.port 65536: expected 1 to 65535"),
        ("backend", "mpi", "offer.backend 'mpi': expected gloo or nccl"),
        ("backend", "", "offer.backend '': expected gloo or nccl"),
    ],
)
def test_offer_when_a_field_is_wrong_then_named(field: str, value: object, words: str) -> None:
    message = weight_sync_service_pb2.BroadcastOffer(address="a", port=1, backend="gloo")
    setattr(message, field, value)
    with pytest.raises(InvalidInput) as caught:
        offer_from_pb(message)
    assert str(caught.value) == words
