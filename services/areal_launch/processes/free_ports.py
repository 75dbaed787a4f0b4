"""Free ports on loopback that stay the same when a trial is run again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from areal.addresses import loopback
from areal.chassis.files import foreign_owner

# Below the range from which the kernel takes ports of outgoing connections: a port found free here
# is not taken by a passing client before its server has started.
FIRST_PORT, LAST_PORT = 20_000, 31_999


class PortPicker:
    """Hands out free ports, each once, and to no other picker of this user meanwhile.

    Servers take seconds to listen: until then a lock file says that the port is promised.

    Example:
        >>> picker = PortPicker({"redis": 23117})
        >>> picker.pick("redis")  # the port of last time, if it is still free
        23117
    """

    def __init__(self, preferred: Mapping[str, int] | None = None) -> None:
        """`preferred` has the ports of an earlier run, by process name."""
        self._preferred = preferred or {}
        self._given: set[int] = set(self._preferred.values())
        self._promises: list[int] = []

    def pick(self, name: str) -> int:
        """Returns a port that is free and not promised; raises OSError when all are taken."""
        before = self._preferred.get(name)
        if before is not None and port_is_free(before) and self._promise(before):
            return before
        start = random.randrange(FIRST_PORT, LAST_PORT)  # noqa: S311 - not a secret
        for offset in range(LAST_PORT - FIRST_PORT + 1):
            port = FIRST_PORT + (start - FIRST_PORT + offset) % (LAST_PORT - FIRST_PORT + 1)
            if port not in self._given and port_is_free(port) and self._promise(port):
                self._given.add(port)
                return port
        raise OSError(f"no free port in {FIRST_PORT}-{LAST_PORT}")

    def _promise(self, port: int) -> bool:
        """Keeps a port from other pickers until this one is gone; False: it is another's."""
        folder = Path(tempfile.gettempdir()) / f"areal-ports-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if foreign_owner(folder):  # all users may write there: one has taken our name
                return True
            # Not blocking, for a FIFO would wait for a reader.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(folder / str(port), flags, 0o600)
        except OSError:  # no place for locks: as good as without
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._promises.append(file)
        return True

    def close(self) -> None:
        """Lets others have the ports."""
        for file in self._promises:
            with contextlib.suppress(OSError):
                os.close(file)
        self._promises.clear()

    def __del__(self) -> None:
        self.close()


def port_is_free(port: int) -> bool:
    """Whether a server could listen on loopback there now."""
    host = loopback()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
