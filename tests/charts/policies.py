"""What the NetworkPolicies of a release allow, read from the objects themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
EVERY = "*"
"""Every component of the release."""


def components(selector: Json) -> list[str]:
    """Those that a podSelector of the release chooses."""
    if one := selector.get("matchLabels", {}).get(COMPONENT):
        return [one]
    for each in selector.get("matchExpressions", []):
        if each["key"] == COMPONENT and each["operator"] == "In":
            return list(each["values"])
    return [EVERY]


def _ports(rule: Json) -> list[int | None]:
    if "ports" not in rule:
        return [None]
    return [each["port"] for each in rule["ports"] if each.get("protocol", "TCP") == "TCP"]


def _policies(objects: Iterable[Json]) -> list[Json]:
    return [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]


def edges(objects: Iterable[Json]) -> Iterator[tuple[str, str, int | None]]:
    """(caller, called, port) inside the release; None: every port."""
    for spec in _policies(objects):
        for rule in spec.get("ingress", []):
            callers = [
                caller
                for peer in rule.get("from", [])
                if "podSelector" in peer and "namespaceSelector" not in peer
                for caller in components(peer["podSelector"])
                if caller != EVERY  # another release's pods, or all of the namespace's
            ]
            for called in components(spec["podSelector"]):
                for caller in callers:
                    for port in _ports(rule):
                        yield caller, called, port


@dataclass(frozen=True)
class Allowed:
    """The doors of a release; a port of None is every port."""

    inside: frozenset[tuple[str, str, int | None]]
    """(caller, called, port)."""
    inward: frozenset[tuple[str, int | None]]
    """(called, port) that callers outside the release may use."""
    outward: frozenset[tuple[str, int | None]]
    """(caller, port) that it may use outside the release."""

    @classmethod
    def of(cls, objects: Iterable[Json]) -> Allowed:
        """Reads the NetworkPolicies among them."""
        objects = list(objects)
        inward, outward = set(), set()
        for spec in _policies(objects):
            chosen = components(spec["podSelector"])
            for rule in spec.get("ingress", []):
                peers = rule.get("from", [{"namespaceSelector": {}}])
                if any("podSelector" not in peer or "namespaceSelector" in peer for peer in peers):
                    inward.update((called, port) for called in chosen for port in _ports(rule))
            for rule in spec.get("egress", []):
                if "to" not in rule:
                    outward.update((caller, port) for caller in chosen for port in _ports(rule))
        return cls(frozenset(edges(objects)), frozenset(inward), frozenset(outward))

    def allows(self, caller: str | None, called: str | None, port: int) -> bool:
        """Whether a connection may be; None: somebody outside the release."""
        if caller is None:
            return any((each, p) in self.inward for each in (called, EVERY) for p in (port, None))
        if called is None:
            return any((each, p) in self.outward for each in (caller, EVERY) for p in (port, None))
        return any((caller, called, p) in self.inside for p in (port, None))
