"""Control groups of boxes: hard limits, where this process may make groups (cgroup v2, delegated).

A group counts all memory of a box, in any process: shared memory, memfds, /tmp, buffers of pipes
and sockets. Without one, the box's first process counts what it sees (session.py).

    user@1000.service/areal.scope      delegated: `systemd-run --user --scope -p Delegate=yes …`
      ├── areal                        what ran in it (no group has both processes and limits)
      └── box-0f3a9c…                 a box: memory.max, pids.max
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from areal.errors import CannotStart
from areal.protocol.boxes import Limits

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NEEDED = {"memory", "pids"}
_OURS_MB = 64
"""Memory for the box's own processes and for page tables, in MiB."""
_OURS_PROCESSES = 8
_LEAF = "areal"
_TRIES = 10


def delegated(mount: Path = _MOUNT, own: Path = _OWN) -> Path | None:
    """Returns the group in which this process may make groups; None: it has none.

    Only a group that systemd marks as delegated counts, or one whose leaf this process is in: root
    may write to all others, too, but they belong to the system's own manager.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
        (path,) = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
        here = mount / path
        place = here.parent if here.name == _LEAF else here
        controllers = set((place / "cgroup.controllers").read_text("utf-8").split())
        marked = os.getxattr(place, "user.delegate") == b"1"
    except (OSError, ValueError):
        return None
    may = os.access(place, os.W_OK) and os.access(place / "cgroup.procs", os.W_OK)
    return place if marked and may and controllers >= _NEEDED else None


class Group:
    """The group of one box."""

    def __init__(self, place: Path) -> None:
        """Makes a group in a delegated one.

        Raises:
            CannotStart: The kernel refuses it; names the group.
        """
        leaf = place / _LEAF
        try:
            leaf.mkdir(exist_ok=True)
            for left in reversed(range(_TRIES)):
                for pid in (place / "cgroup.procs").read_text("utf-8").split():
                    with suppress(ProcessLookupError):
                        (leaf / "cgroup.procs").write_text(pid, "utf-8")
                try:
                    (place / "cgroup.subtree_control").write_text("+memory +pids", "utf-8")
                    break
                except OSError as error:  # busy: another process has come meanwhile
                    if error.errno != errno.EBUSY or not left:
                        raise
            self.path = place / f"box-{secrets.token_hex(6)}"
            self.path.mkdir()
        except OSError as error:
            raise CannotStart(
                f"sandbox: cgroup {place}: expected a delegated group of this user's: {error}"
            ) from None

    def enter(self, command: Sequence[str]) -> list[str]:
        """Returns a command that enters the group before it runs the given one."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self.path), *command]

    def limit(self, limits: Limits) -> None:
        """Sets what all in the box may use together: memory_mb, and disk_mb for each folder."""
        most = limits.memory_mb + 2 * limits.disk_mb + _OURS_MB
        with suppress(FileNotFoundError):  # a kernel without swap
            (self.path / "memory.swap.max").write_text("0", "utf-8")
        (self.path / "memory.max").write_text(str(most << 20), "utf-8")
        (self.path / "pids.max").write_text(str(limits.processes + _OURS_PROCESSES), "utf-8")

    def killed(self) -> int:
        """Returns how many processes the kernel has ended for their memory."""
        lines = (self.path / "memory.events").read_text("utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        """Ends what is left, and removes the group."""
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1", "utf-8")
        with suppress(
            OSError
        ):  # the last process may still be ending; an empty group costs nothing
            self.path.rmdir()
