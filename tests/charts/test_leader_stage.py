"""The stage of `make e2e-kubernetes` that takes weight-sync's leader away."""

from __future__ import annotations

import json

from tests.kubernetes import upkeep


def pod(name, *, ready=False, leaving=False):
    metadata = {"name": name, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {})}
    conditions = [{"type": "Ready", "status": str(ready)}]
    containers = [{"state": {"running": {}}}]
    return {
        "metadata": metadata,
        "status": {"conditions": conditions, "containerStatuses": containers},
    }


class Cluster:
    """Shows other pods each time it is asked; all but the ready ones stand by."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def pods(self, component):
        assert component == "weight-sync"
        return self.looks.pop(0)

    def kubectl(self, *arguments, check=True):
        return json.dumps({"event": "standby", "timestamp": "2026-01-01T00:00:00Z"})


def test_leader_and_standby_when_a_third_pod_is_leaving_then_waits_until_it_is_gone(monkeypatch):
    """Its container may run again, and take the lease in the place of the standby."""
    monkeypatch.setattr("tests.kubernetes.cluster.time.sleep", lambda seconds: None)
    leader, standby = pod("a", ready=True), pod("b")
    cluster = Cluster([leader, standby, pod("c", leaving=True)], [leader, standby])
    assert upkeep.leader_and_standby(cluster) == (leader, standby)
    assert cluster.looks == []
