"""Free ports on loopback that stay the same when a trial is run again."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping

# Below the range from which the kernel takes ports of outgoing connections: a port found free here
# is not taken by a passing client before its server has started.
FIRST_PORT, LAST_PORT = 20_000, 31_999


class PortPicker:
    """Hands out free ports, each once.

    Example:
        >>> picker = PortPicker({"redis": 23117})
        >>> picker.pick("redis")  # the port of last time, if it is still free
        23117
    """

    def __init__(self, preferred: Mapping[str, int] | None = None) -> None:
        """`preferred`: name to port of an earlier run."""
        self._preferred = preferred or {}
        self._given: set[int] = set(self._preferred.values())

    def pick(self, name: str) -> int:
        """A port that nobody listens on now; raises OSError when all are taken."""
        before = self._preferred.get(name)
        if before is not None and port_is_free(before):
            return before
        start = random.randrange(FIRST_PORT, LAST_PORT)  # noqa: S311 - not a secret
        for offset in range(LAST_PORT - FIRST_PORT + 1):
            port = FIRST_PORT + (start - FIRST_PORT + offset) % (LAST_PORT - FIRST_PORT + 1)
            if port not in self._given and port_is_free(port):
                self._given.add(port)
                return port
        raise OSError(f"no free port in {FIRST_PORT}-{LAST_PORT}")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on loopback there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
