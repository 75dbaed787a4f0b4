from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger_support import make_group

from areal.errors import InvalidInput
from areal.protocol.trajectories import MIN_BYTES, GroupCodec, group_to_pb
from areal.v1 import trajectory_pb2


@settings(deadline=None)
@given(st.integers(3, 400), st.integers(1, 8))
def test_group_when_stored_and_read_then_the_same_bytes(length: int, samples: int) -> None:
    payload = group_to_pb(make_group("a", samples=samples, length=length)).SerializeToString()
    stored = GroupCodec().compress(payload)
    assert GroupCodec().expand(stored) == payload
    assert len(stored) < len(payload) or len(payload) < MIN_BYTES
    assert GroupCodec().expand(payload) == payload  # as stored without compression


def test_frame_when_it_claims_more_than_is_allowed_then_refused_before_it_is_expanded() -> None:
    bomb = GroupCodec().compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    with pytest.raises(InvalidInput, match="50000000 bytes: at most 1000000"):
        GroupCodec().expand(bomb, 1_000_000)
    with pytest.raises(InvalidInput, match="600 bytes: at most 599"):
        GroupCodec().expand(b"\0" * 600, 599)


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: f + b"x", lambda f: f[:6]])
def test_frame_when_broken_then_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidInput, match="zstd"):
        GroupCodec().expand(change(GroupCodec().compress(bytes(range(256)) * 16)))


def test_message_when_it_has_a_field_5_then_the_magic_would_not_do() -> None:
    assert 5 not in trajectory_pb2.TrajectoryGroup.DESCRIPTOR.fields_by_number
