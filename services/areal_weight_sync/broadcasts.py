"""Decides which servers take part in a broadcast: a group lasts while the same servers serve."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from areal.weights.broadcast import Offer, Seat, Seats
from areal.weights.manifest import PolicyVersion


class Broadcasts:
    """The servers' places in the broadcast of the newest version.

    Example:
        >>> broadcasts.seat(version, offer, {"10.0.0.7:30000": ("boot-1", 1)})
        Seats(group='areal-7f3a91', world_size=2)
    """

    def __init__(self) -> None:
        self._group = ""
        self._members: dict[str, tuple[str, int]] = {}
        self._seats: dict[str, Seat] = {}
        self._version = (-1, -1)
        self._answer: tuple[Offer, Seats] | None = None

    def seat(
        self, version: PolicyVersion, offer: Offer, members: Mapping[str, tuple[str, int]]
    ) -> Seats:
        """Gives every member its ranks.

        Args:
            version: The version that will be broadcast.
            offer: The trainer's; it says which group it still has.
            members: Boot id and number of ranks, by server id.
        """
        if offer.group != self._group or not self._group or dict(members) != self._members:
            self._group, self._members = f"areal-{secrets.token_hex(4)}", dict(members)
        size = 1 + sum(ranks for _, ranks in self._members.values())
        self._version, self._seats, rank = (version.version, version.incarnation), {}, 1
        for server_id, (_, ranks) in self._members.items():
            self._seats[server_id] = Seat(offer, self._group, rank, size, version.tensors)
            rank += ranks
        self._answer = offer, Seats(self._group, size)
        return self._answer[1]

    def given(self, version: PolicyVersion, offer: Offer) -> Seats | None:
        """Returns the earlier answer to the same offer of the same version, or None."""
        if self._answer is None or (version.version, version.incarnation) != self._version:
            return None
        return self._answer[1] if self._answer[0] == offer else None

    def end(self, server_id: str) -> None:
        """Drops a group that a server may have left: the next version gets a new one."""
        if server_id in self._members:
            self._group = ""

    def take(self, server_id: str, version: PolicyVersion) -> Seat | None:
        """Returns a server's place, once: a failed broadcast is not tried again.

        Also when the version has been stored by now: the others wait for this one.
        """
        if (version.version, version.incarnation) != self._version:
            return None
        return self._seats.pop(server_id, None)
