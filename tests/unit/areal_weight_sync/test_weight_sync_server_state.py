from __future__ import annotations

import pytest

from areal.errors import InvalidInput
from areal.protocol.versions import server_from_pb, server_to_pb
from areal.weights.servers import ServerState
from areal_weight_sync.engine.http import normalize_url
from areal_weight_sync.server_state import TRANSITIONS, ServerRecord


def test_move_when_the_table_forbids_it_then_raises():
    for before in ServerState:
        for after in ServerState:
            record = ServerRecord("a:1", "http://a:1", state=before)
            if after is before or after in TRANSITIONS[before]:
                record.move(after)
                assert record.state is after
            else:
                with pytest.raises(ValueError, match=f"{before} -> {after}"):
                    record.move(after)


def test_move_when_nothing_changes_then_says_so_and_keeps_the_time():
    record = ServerRecord("a:1", "http://a:1", since=5.0)
    assert not record.move(ServerState.JOINING)
    assert record.move(ServerState.JOINING, "not up yet")
    assert record.since == 5.0
    assert record.move(ServerState.SYNCING)
    assert (record.cause, record.since > 5.0) == ("", True)


def test_record_when_read_back_then_joins_again_with_what_it_had():
    record = ServerRecord("a:1", "http://a:1", version=4, boot_id="x", aborted_requests=2)
    record.move(ServerState.QUARANTINED, "dead")
    back = ServerRecord.from_json(record.to_json())
    assert (back.state, back.cause) == (ServerState.JOINING, "")
    assert (back.version, back.boot_id, back.aborted_requests) == (4, "x", 2)
    with pytest.raises(InvalidInput):
        ServerRecord.from_json(b"{}")


def test_server_when_sent_over_the_wire_then_equal():
    record = ServerRecord("a:1", "http://a:1", version=4, since=1763700000.25)
    record.move(ServerState.QUARANTINED, "dead")
    record.since = 1763700000.25
    assert server_from_pb(server_to_pb(record.public())) == record.public()


def test_url_when_spelled_differently_then_one_server_id():
    assert normalize_url(" http://10.0.0.1:30000/ ") == ("10.0.0.1:30000", "http://10.0.0.1:30000")
    assert normalize_url("http://Sglang-0.Pool")[0] == "sglang-0.pool:80"
    assert normalize_url("http://[::1]:3")[1] == "http://[::1]:3"
    for bad in ("10.0.0.1:30000", "http://", "http://u:p@h:1", "http://h:99999", "http://h/x"):
        with pytest.raises(InvalidInput, match="url"):
            normalize_url(bad)
