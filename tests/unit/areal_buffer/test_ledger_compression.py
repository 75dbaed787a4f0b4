from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger_support import make_group

from areal.v1 import trajectory_pb2
from areal.wire import group_to_pb
from areal_buffer.compression import MIN_BYTES, compress, expand


@settings(deadline=None)
@given(st.integers(3, 400), st.integers(1, 8))
def test_group_when_stored_and_read_then_the_same_bytes(length: int, samples: int) -> None:
    payload = group_to_pb(make_group("a", samples=samples, length=length)).SerializeToString()
    stored = compress(payload)
    assert expand(stored) == payload
    assert len(stored) < len(payload) or len(payload) < MIN_BYTES
    assert expand(payload) == payload  # as stored without compression


def test_message_when_it_has_a_field_5_then_the_magic_would_not_do() -> None:
    assert 5 not in trajectory_pb2.TrajectoryGroup.DESCRIPTOR.fields_by_number
