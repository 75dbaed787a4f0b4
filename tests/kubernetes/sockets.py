"""Looks at the sockets of every pod on this node, while the stages run.

| thread  | does                          | ends by                   |
|---------|-------------------------------|---------------------------|
| Watcher | a look every EVERY_S seconds  | `close`, within one look  |

Needs a node that is this machine and the right to read other processes' /proc.
"""

from __future__ import annotations

import re
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from tests.charts.policies import Allowed
from tests.kubernetes.census import Census, Directory, Pod, Socket, parse
from tests.kubernetes.cluster import Cluster, Failed

EVERY_S = 2.0
KINDS = "pods,services,networkpolicies"


def local_addresses(fib_trie: str) -> set[str]:
    """Of a network namespace, out of its /proc/net/fib_trie."""
    return set(re.findall(r"\|-- ([\d.]+)\n\s+/32 host LOCAL", fib_trie))


def tables() -> dict[str, list[Socket]]:
    """The sockets of every network namespace of this machine but its own, by its addresses."""
    seen, found = {Path("/proc/self/ns/net").readlink()}, dict[str, list[Socket]]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            namespace = (process / "ns/net").readlink()
            if namespace in seen:
                continue
            texts = [(process / "net" / name).read_text() for name in ("tcp", "tcp6")]
            addresses = local_addresses((process / "net/fib_trie").read_text())
            found |= dict.fromkeys(addresses, parse("".join(texts)))
            seen.add(namespace)
    return found


class Watcher:
    """Takes the census of one release; `check` at the end of every stage."""

    def __init__(self, cluster: Cluster) -> None:
        """Begins to look."""
        self.census = Census()
        self.stage = "before the first stage"
        self._cluster, self._directory = cluster, Directory()
        self._directory.update(cluster.get("nodes"))
        self._directory.update(cluster.get("service", "kubernetes", "--namespace=default"))
        self._lock, self._over = threading.Lock(), threading.Event()
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="census", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            with suppress(subprocess.SubprocessError):  # kubectl's; the next look has another
                try:
                    self.look()
                except (LookupError, ValueError, AssertionError) as error:
                    self._broken = error
                    return

    def look(self) -> None:
        """One look, at the pods that there are."""
        with self._lock:
            found = tables()  # before the pods are listed: who connects is in that list
            objects = self._cluster.get(KINDS)
            self._directory.update(objects)
            sockets: list[tuple[Pod, list[Socket]]] = [
                (pod, found[pod.address]) for pod in self._directory.pods if pod.address in found
            ]
            if sockets:
                self.census.look(self.stage, self._directory, Allowed.of(objects), sockets)

    def check(self) -> None:
        """One more look; raises `Failed` with what no policy allows.

        Raises:
            Failed: Named connections, or a census that sees nothing.
        """
        self.look()
        if self._broken is not None:
            raise Failed(f"the census broke: {self._broken!r}") from self._broken
        if self._directory.pods and not self.census.looks:
            raise Failed(
                "the census reads the pods' sockets in /proc of their node: run this there, as "
                "root, or give --no-census"
            )
        if said := self.census.complaint():
            raise Failed(said)

    def close(self) -> None:
        """No more looks."""
        self._over.set()
        self._thread.join(60.0)
