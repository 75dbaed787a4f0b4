"""How many servers there are in each state, at each version: kept up to date, not counted again.

So that a watcher costs the same for 1,000 servers as for one.
"""

from __future__ import annotations

from collections import Counter

from areal.weights.servers import ServerState


class Census:
    """State only.

    Example:
        >>> census.put("10.0.0.7:30000", ServerState.SERVING, 12)
        >>> census.number(ServerState.SERVING, 12)
        1
    """

    def __init__(self) -> None:
        self._shown: dict[str, tuple[ServerState, int]] = {}
        self._numbers: Counter[tuple[ServerState, int]] = Counter()

    def put(self, server_id: str, state: ServerState, version: int) -> None:
        """Where a server is now."""
        self.drop(server_id)
        self._shown[server_id] = state, version
        self._numbers[state, version] += 1

    def drop(self, server_id: str) -> None:
        """It has gone, or is counted again."""
        before = self._shown.pop(server_id, None)
        if before is not None:
            self._numbers[before] -= 1
            if not self._numbers[before]:
                del self._numbers[before]

    def number(self, state: ServerState, version: int) -> int:
        """Servers in a state, at a version."""
        return self._numbers[state, version]

    def states(self) -> dict[ServerState, int]:
        """Servers by state."""
        counts = dict.fromkeys(ServerState, 0)
        for (state, _), number in self._numbers.items():
            counts[state] += number
        return counts

    def versions(self, state: ServerState) -> set[int]:
        """Of the servers in a state."""
        return {version for other, version in self._numbers if other is state}
