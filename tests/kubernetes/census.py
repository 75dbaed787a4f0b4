"""Who connects to whom in a running release, against what its NetworkPolicies allow.

    every pod's TCP sockets ──> Directory: address -> component ──> (caller, called, port)
                                                                      └─> Allowed, or named

A cluster may accept policies and enforce none: then a missing edge cuts nothing there, and shows
only in the sockets. A closed connection stays in its pod's table for a minute (TIME_WAIT), so that
looks a few seconds apart see short ones too. Pure: `sockets.py` reads, this counts.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.charts.policies import COMPONENT, Allowed

Json = dict[str, Any]
_LISTEN, _CLOSED = 0x0A, 0x07
INSTANCE = "app.kubernetes.io/instance"
NODE, OUTSIDE = "(node)", "(outside)"
_PATIENCE = 3
"""Looks after which an address that no pod has is one outside."""


class Socket(NamedTuple):
    """A line of /proc/net/tcp."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    listens: bool


class Connection(NamedTuple):
    """A kind of connection: components of the release, NODE, or OUTSIDE; port 0: any."""

    caller: str
    called: str
    port: int

    def __str__(self) -> str:
        return f"{self.caller} -> {self.called} {self.port or '(any port)'}"

    @property
    def inside(self) -> bool:
        """Whether both ends are the release's."""
        return not {self.caller, self.called} & {NODE, OUTSIDE}


def _address(text: str) -> tuple[str, int]:
    address, port = text.split(":")
    packed = bytes.fromhex(address)  # words of four bytes, each the wrong way round
    packed = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
    found = ipaddress.ip_address(packed)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found), int(port, 16)


def parse(text: str) -> list[Socket]:
    """The sockets of /proc/net/tcp or tcp6, without those of the loopback."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or not words[0].endswith(":"):
            continue  # the heading
        state = int(words[3], 16)
        (local, local_port), (remote, remote_port) = _address(words[1]), _address(words[2])
        if state == _CLOSED or ipaddress.ip_address(remote).is_loopback:
            continue
        found.append(Socket(local, local_port, remote, remote_port, state == _LISTEN))
    return found


class Pod(NamedTuple):
    """Of the release."""

    uid: str
    component: str
    address: str


@dataclass
class Directory:
    """Whose an address is now."""

    release: str = "areal"
    owners: dict[str, str] = field(default_factory=dict)
    """Address to component, NODE or OUTSIDE."""
    pods: list[Pod] = field(default_factory=list)
    """Of the release: those that stay."""
    past: set[str] = field(default_factory=set)
    """Addresses that pods have had: the next pod may have them before it is shown."""
    _fixed: dict[str, str] = field(default_factory=dict)

    def update(self, objects: Iterable[Json]) -> None:
        """Reads Pods, Services and Nodes among the objects, as the cluster's API shows them."""
        self.pods, current = [], dict[str, str]()
        for each in objects:
            if each["kind"] == "Pod" and (address := each["status"].get("podIP")):
                self.past.add(address)
                over = each["status"]["phase"] in ("Succeeded", "Failed")
                if over or "deletionTimestamp" in each["metadata"]:
                    continue  # its address may be another's already
                current[address] = owner = self._owner(each["metadata"].get("labels"))
                if owner != OUTSIDE:
                    self.pods.append(Pod(each["metadata"]["uid"], owner, address))
            elif each["kind"] == "Service" and each["spec"].get("clusterIP", "None") != "None":
                # Its ports have its pods' numbers.
                self._fixed[each["spec"]["clusterIP"]] = self._owner(each["spec"].get("selector"))
            elif each["kind"] == "Node":
                self._fixed |= {at["address"]: NODE for at in each["status"]["addresses"]}
        self.owners = self._fixed | current

    def _owner(self, labels: dict[str, str] | None) -> str:
        labels = labels or {}
        return labels[COMPONENT] if labels.get(INSTANCE) == self.release else OUTSIDE


@dataclass
class Census:
    """What has been seen. Not thread-safe."""

    looks: int = 0
    pods: set[str] = field(default_factory=set)
    kinds: Counter[Connection] = field(default_factory=Counter)
    """How many different connections of each kind."""
    unlisted: dict[Connection, str] = field(default_factory=dict)
    """Those that no policy allows, with the stage in which each was seen first."""
    allowed: Allowed | None = None
    """What the policies said last."""
    _live: dict[tuple[str, Socket], Connection | None] = field(default_factory=dict)
    """None: unknown; the other end was a pod that left, or one not shown yet."""
    _unknown: Counter[tuple[str, Socket]] = field(default_factory=Counter)
    _listened: dict[str, set[int]] = field(default_factory=dict)

    def look(
        self,
        stage: str,
        directory: Directory,
        allowed: Allowed,
        sockets: Iterable[tuple[Pod, list[Socket]]],
    ) -> None:
        """Takes one look at all pods.

        Args:
            stage: What the run is doing.
            directory: Whose the addresses are now.
            allowed: What the policies say now.
            sockets: Of each pod that could be read.
        """
        self.looks, self.allowed = self.looks + 1, allowed
        live: dict[tuple[str, Socket], Connection | None] = {}
        for pod, table in sockets:
            self.pods.add(pod.uid)
            listened = self._listened.setdefault(pod.uid, set())
            listened.update(each.local_port for each in table if each.listens)
            for each in table:
                key = pod.uid, each
                if each.listens or not self._told(key, directory):
                    continue
                # What a connection was when it was new it stays: addresses are used again.
                if key in self._live:
                    kind = self._live[key]
                else:
                    kind = _kind(pod, each, directory, listened, allowed)
                    self.kinds.update([kind] if kind else [])
                live[key] = kind
                if kind and not _fine(kind, allowed):
                    self.unlisted.setdefault(kind, stage)
        self._live = live

    def _told(self, key: tuple[str, Socket], directory: Directory) -> bool:
        """Whether it is time: whose an address is that no pod had the next look may know."""
        self._unknown[key] += 1
        known = key[1].remote in directory.owners or key[1].remote in directory.past
        return known or key in self._live or self._unknown[key] >= _PATIENCE

    def complaint(self) -> str:
        """The unlisted ones, in words; empty: there are none."""
        return "; ".join(
            f"{kind}: no NetworkPolicy allows it (seen during: {stage})"
            for kind, stage in sorted(self.unlisted.items(), key=lambda item: str(item[0]))
        )

    def report(self) -> list[str]:
        """Lines for people."""
        assert self.allowed is not None, "no look was taken"
        inside = sorted(str(kind) for kind in self.kinds if kind.inside)
        through = sorted(str(kind) for kind in self.kinds if not kind.inside)
        met = {(kind.caller, kind.called) for kind in self.kinds}
        unmet = sorted({f"{a} -> {b}" for a, b, _ in self.allowed.inside if (a, b) not in met})
        return [
            f"Connections: {len(self.pods)} pods were sampled {self.looks} times; "
            f"{sum(self.kinds.values())} connections of {len(self.kinds)} kinds were seen, and a "
            "NetworkPolicy allows each of them.",
            f"Connections inside the release: {', '.join(inside)}.",
            f"Connections from and to the outside: {', '.join(through)}.",
            f"Connections that are allowed, but were not seen: {', '.join(unmet) or 'none'}.",
        ]


def _kind(
    pod: Pod, socket: Socket, directory: Directory, listened: set[int], allowed: Allowed
) -> Connection | None:
    other = directory.owners.get(socket.remote)
    if other is None and socket.remote in directory.past:
        return None
    caller, called, port = pod.component, other or OUTSIDE, socket.remote_port
    if socket.local_port in listened:
        caller, called, port = called, caller, socket.local_port
    # Ranks choose their ports: one kind.
    return Connection(caller, called, 0 if (caller, called, None) in allowed.inside else port)


def _fine(kind: Connection, allowed: Allowed) -> bool:
    if kind.caller == NODE:
        return True  # probes and NodePorts: a node's own processes are let in always
    caller, called = (None if end in (NODE, OUTSIDE) else end for end in kind[:2])
    return allowed.allows(caller, called, kind.port)
