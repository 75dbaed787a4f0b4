"""What the stages about a release's upkeep need: other charts, lost leaders, rotated secrets."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import redis
import yaml
from tests.kubernetes.cluster import (
    CHART,
    Cluster,
    Failed,
    Json,
    is_leaving,
    is_ready,
    time_of,
    wait,
)

TAKEOVERS = 10
LEADER_S = 5.0
"""Within which a standby is the leader."""
GAP_S = 60.0
"""Longest time between two steps while secrets are rotated."""
LIMITED = """
apiVersion: v1
kind: ResourceQuota
metadata: {name: team}
spec:
  hard: {limits.cpu: "90", limits.memory: 180Gi, requests.cpu: "20", requests.memory: 60Gi}
---
apiVersion: v1
kind: LimitRange
metadata: {name: defaults}
spec:
  limits:
    - type: Container
      default: {cpu: "2", memory: 1Gi}
      defaultRequest: {cpu: 50m, memory: 64Mi}
      max: {cpu: "8", memory: 16Gi}
"""


def limit(cluster: Cluster, scratch: Path) -> None:
    """Gives the namespace a quota on limits, so that no pod without limits is admitted."""
    file = scratch / "limits.yaml"
    file.write_text(LIMITED)
    cluster.kubectl("apply", "-f", str(file))


def bumped_chart(scratch: Path) -> Path:
    """The chart as another version, which makes the same pods."""
    folder = scratch / "bumped"
    shutil.copytree(CHART, folder, dirs_exist_ok=True)
    about = yaml.safe_load((folder / "Chart.yaml").read_text())
    about |= {"version": "99.0.0", "appVersion": "99.0.0"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about))
    return folder


def lasting(cluster: Cluster) -> dict[str, str]:
    """Uid and restarts of each pod that stays, to its name; those of the Job prepare have ended."""
    label = "app.kubernetes.io/instance=areal,app.kubernetes.io/component!=prepare"
    found = {}
    for pod in cluster.get("pods", "-l", label):
        if not is_leaving(pod):
            restarts = sum(c["restartCount"] for c in pod["status"].get("containerStatuses", []))
            found[f"{pod['metadata']['uid']} with {restarts} restarts"] = pod["metadata"]["name"]
    return found


def no_failed_revision(cluster: Cluster) -> int:
    """The number of the release's revisions; raises `Failed` if one failed."""
    revisions = json.loads(cluster.helm("history", "areal", "-o", "json"))
    for each in revisions:
        if each["status"] not in ("superseded", "deployed"):
            raise Failed(f"revision {each['revision']}: {each['status']}: {each['description']}")
    return len(revisions)


# -- the leader of weight-sync --------------------------------------------------------------------


def leader_and_standby(cluster: Cluster) -> tuple[Json, Json]:
    """The ready pod of weight-sync and the one that runs and is not ready.

    Waits until no third one is leaving: its container may have been started again, and would be
    the leader for the rest of its time.
    """

    def both() -> tuple[Json, Json] | None:
        pods = cluster.pods("weight-sync")
        ready = [pod for pod in pods if is_ready(pod)]
        if any(map(is_leaving, pods)):
            return None
        others = [pod for pod in pods if pod not in ready and standing_by(cluster, pod)]
        return (ready[0], others[0]) if len(ready) == len(others) == 1 else None

    found: tuple[Json, Json] = wait("a leader and a standby of weight-sync", both, 300.0)
    return found


def standing_by(cluster: Cluster, pod: Json) -> bool:
    """Whether its process is up and has found another leader."""
    status = pod["status"]["containerStatuses"][0]
    events = [name for _, name in events_of(cluster, pod)]
    return "running" in status["state"] and events[-1:] == ["standby"]


def events_of(cluster: Cluster, pod: Json) -> list[tuple[datetime, str]]:
    """When its container's process became the leader or the standby."""
    found = []
    for line in cluster.kubectl("logs", pod["metadata"]["name"], check=False).splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if entry["event"] in ("active", "standby"):
                found.append((time_of(entry["timestamp"]), str(entry["event"])))
    return found


def processes(pod: Json) -> list[int]:
    """Of its containers, on this machine, which is its node."""
    ids = [c["containerID"].partition("://")[2] for c in pod["status"]["containerStatuses"]]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(each in (process / "cgroup").read_text() for each in ids):
                found.append(int(process.name))
    if not found:
        raise Failed("the leader's processes are not on this machine; give --no-census")
    return found


def lose_leader(cluster: Cluster, number: int) -> float:
    """Kills the leader, or stops it for a while; returns the seconds until there is another."""
    leader, standby = leader_and_standby(cluster)
    killed = number % 2 == 0
    began = datetime.now(UTC)
    for pid in (pids := processes(leader)):
        os.kill(pid, signal.SIGKILL if killed else signal.SIGSTOP)

    def taken() -> float:
        for pod in (standby, leader):
            for when, event in events_of(cluster, pod):
                if event == "active" and when > began:
                    return (when - began).total_seconds()
        return 0.0

    try:
        return float(wait("another leader", taken, 60.0, pause=0.3))
    finally:
        if killed:  # the kubelet would wait longer and longer before it starts the container again
            cluster.kubectl("delete", "pod", leader["metadata"]["name"], "--wait=false")
        else:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextmanager
def store(cluster: Cluster) -> Iterator[redis.Redis]:
    """A client of the release's Redis."""
    with cluster.forward("areal-redis", 6379) as address:
        host, port = address.split(":")
        with redis.Redis(host, int(port), password=cluster.secret("redis-password")) as client:
            yield client


def published(cluster: Cluster, run: str) -> tuple[int, int]:
    """(current version, number of accepted publications) of a run, as Redis has them."""
    with store(cluster) as client:
        version, count = client.hmget(f"areal:{{{run}}}:weights", "version", "published")
        return int(version or 0), int(count or 0)


# -- secrets --------------------------------------------------------------------------------------


def rotate(cluster: Cluster) -> str:
    """New secrets beside the previous ones; returns the new token."""
    fresh = {name: secrets.token_urlsafe(32) for name in ("token", "redis-password", "nats-token")}
    data = {
        **fresh,
        "token-previous": cluster.secret("token"),
        "redis-password-previous": cluster.secret("redis-password"),
    }
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in data.items()}
    cluster.kubectl("patch", "secret", "areal-auth", "-p", json.dumps({"data": encoded}))
    return fresh["token"]


class Gaps:
    """Looks at the number of steps twice a second, and keeps the longest time without a new one."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step, self._over = step, threading.Event()
        self.longest, self._last, self._since = 0.0, -1, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gaps", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            with suppress(Exception):  # no pod to read through, for a moment
                now = self._step()
                self.longest = max(self.longest, time.monotonic() - self._since)
                if now != self._last:
                    self._last, self._since = now, time.monotonic()

    def close(self) -> float:
        """Stops looking; returns the longest gap, in seconds."""
        self._over.set()
        self._thread.join(60.0)
        return max(self.longest, time.monotonic() - self._since)
