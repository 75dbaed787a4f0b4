"""What a server is told about the groups of a trainer."""

from __future__ import annotations

from typing import Any

import pytest

from areal.weights.broadcast import Offer, Seat
from areal.weights.manifest import PolicyVersion, WeightTensor
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.broadcast_group import BroadcastGroup

VERSION = PolicyVersion(3, 1, "/v3", tensors=(WeightTensor("w", (2,), "F32"),))


class Server:
    """Notes what it is told; refuses what is in `refused`."""

    def __init__(self, *refused: str) -> None:
        self.told: list[tuple[str, str]] = []
        self.waits: dict[str, float] = {}
        self._refused = refused

    async def command(self, path: str, body: dict[str, Any], timeout: float) -> None:
        self.told.append((path, str(body.get("group_name", ""))))
        self.waits[path] = timeout
        if path in self._refused:
            raise EngineError(Fault.UPDATE_REFUSED, f"{path}: refused")


def seat(group: str, held: str = "") -> Seat:
    return Seat(Offer("127.0.0.1", 7000, "gloo", held), group, 1, 2, VERSION.tensors)


async def test_join_when_this_service_was_restarted_then_the_group_of_its_former_life_is_left():
    """No one else would: the trainer drops its own end, and the server keeps the rest."""
    server = Server("/destroy_weights_update_group")  # it need not be in it
    await BroadcastGroup(server.command).join(seat("new", held="former"))
    assert server.told == [
        ("/destroy_weights_update_group", "former"),
        ("/init_weights_update_group", "new"),
    ]


async def test_join_when_the_group_is_kept_then_nothing_is_asked():
    server = Server()
    membership = BroadcastGroup(server.command)
    await membership.join(seat("one"))
    await membership.join(seat("one", held="one"))
    assert [path for path, _ in server.told] == ["/init_weights_update_group"]


async def test_receive_when_it_breaks_then_the_first_cause_is_told_and_the_rest_is_brief():
    server = Server("/update_weights_from_distributed", "/end_weight_update")
    membership = BroadcastGroup(server.command)
    await membership.join(seat("one"))
    with pytest.raises(EngineError, match="/update_weights_from_distributed: refused"):
        await membership.receive(VERSION, False, 120.0)
    assert server.told[-1] == ("/destroy_weights_update_group", "one")
    assert server.waits["/end_weight_update"] < 10
