"""Pods as the cluster lists them: their state, and why some do not run.

Pending ── image pulled, Secrets found ──> Running
└── ErrImagePull, … : `Problem`; the cluster tries again by itself
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from areal_launch.processes.supervisor import ProcessState, RemoteProcess

# Registries have bad minutes, and Secrets come late; longer than this a run does not wait for them.
STUCK_S = 120.0
# Between two tries a container may look as if it were only starting.
_FORGET_S = 30.0
_STARTING = ("PodInitializing", "ContainerCreating")
_PULL = (
    "push the image to a registry from which the nodes can pull it, or fix image.repository, "
    "image.tag, image.references or image.pullSecrets"
)
# Reason to what a person does about it: no pod gets over these by waiting.
_FIXES = {
    "ErrImagePull": _PULL,
    "ImagePullBackOff": _PULL,
    "RegistryUnavailable": _PULL,
    "ImageInspectError": _PULL,
    "ErrImageNeverPull": "image.pullPolicy is Never: load the image onto the node",
    "InvalidImageName": "fix image.repository, image.tag or image.references",
    "CreateContainerConfigError": "create the Secret or ConfigMap; the pod then starts",
}


@dataclass(frozen=True)
class Problem:
    """Why pods of one component do not run, all for the same reason."""

    pods: tuple[str, ...]
    component: str
    container: str
    """"" when the pod itself cannot start."""
    image: str
    reason: str
    message: str

    @property
    def fix(self) -> str:
        """Returns how to fix it; "" if the cluster may recover by itself."""
        return _FIXES.get(self.reason, "")

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the problem: messages contain changing pauses and nodes."""
        said = () if self.container else (self.message,)
        return (self.component, self.container, self.image, self.reason, *said)

    @property
    def topic(self) -> tuple[str, ...]:
        """Identifies what is told only once: an image that cannot be pulled, for any pod."""
        return (self.image, self.fix) if self.fix == _PULL else self.key

    def __str__(self) -> str:
        more = f" and {len(self.pods) - 1} more" if len(self.pods) > 1 else ""
        where = f"pod {self.pods[0]}{more}"
        if self.fix:
            where += f", container {self.container}, image {self.image}"
        said = f"{where}: {self.reason}: {self.message}".rstrip(": ")
        return f"{said} ({self.fix})" if self.fix else said


def problems_of(pods: Iterable[dict[str, Any]]) -> list[Problem]:
    """Returns what keeps pods from running: an entry per component, container, image, reason."""
    found: dict[tuple[str, ...], Problem] = {}
    for pod in pods:
        if "deletionTimestamp" in pod["metadata"]:
            continue
        for one in _problems(pod):
            same = found.get(one.key)
            found[one.key] = replace(one, pods=(*same.pods, *one.pods)) if same else one
    return list(found.values())


def stuck(pods: list[dict[str, Any]]) -> list[Problem]:
    """Returns problems that stop a whole component and that a person must fix."""
    runs = {component_of(pod) for pod in pods if _ran(pod)}
    return [each for each in problems_of(pods) if each.fix and each.component not in runs]


class StuckWatch:
    """How long components have been unable to start.

    Example:
        >>> watch = StuckWatch()
        >>> watch.look(pods, time.monotonic())  # None, until it has lasted for STUCK_S
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}
        """For each component and container, when it was first and last seen stuck."""

    def look(self, pods: list[dict[str, Any]], now: float) -> tuple[Problem, float] | None:
        """Returns the problem that has lasted too long, and since when; None if there is none.

        Args:
            pods: All of the release.
            now: Seconds on the clock of earlier looks.
        """
        given_up = None
        for problem in stuck(pods):
            name = (problem.component, problem.container)
            first, last = self._seen.get(name, (now, now))
            if now - last > _FORGET_S:
                first = now
            self._seen[name] = (first, now)
            if now - first >= STUCK_S:
                given_up = (problem, first)
        return given_up


def processes_of(pods: list[dict[str, Any]], release: str) -> dict[str, RemoteProcess]:
    """Pods as the live view shows processes."""
    shown = {}
    for pod in pods:
        statuses = pod.get("status", {}).get("containerStatuses") or []
        name = pod["metadata"]["name"].removeprefix(f"{release}-").removeprefix("areal-")
        restarts = sum(status.get("restartCount", 0) for status in statuses)
        shown[name] = RemoteProcess(_state(pod, statuses), restarts)
    return dict(sorted(shown.items()))


def component_of(content: dict[str, Any]) -> str:
    """Returns the component of any object of the chart; "" if it names none."""
    labels = content["metadata"].get("labels") or {}
    return str(labels.get("app.kubernetes.io/component", ""))


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether the pod runs and all its containers are ready."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or [{}]
    return status.get("phase") == "Running" and all(each.get("ready") for each in containers)


def _problems(pod: dict[str, Any]) -> Iterable[Problem]:
    status, name, component = pod.get("status", {}), pod["metadata"]["name"], component_of(pod)
    statuses = [status.get(f"{kind}Statuses") or [] for kind in ("initContainer", "container")]
    for container in itertools.chain(*statuses):
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason is not None and reason not in _STARTING:
            said = " ".join(waiting.get("message", "").split())
            image = container.get("image", "")
            yield Problem((name,), component, container.get("name", ""), image, reason, said)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = f"{condition.get('message', '')}"
            yield Problem((name,), component, "", "", str(condition.get("reason")), said)


def _ran(pod: dict[str, Any]) -> bool:
    """Whether it has got past its images and Secrets: it runs, or has run."""
    if pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed"):
        return not any(problem.fix for problem in _problems(pod))
    return False


def _state(pod: dict[str, Any], statuses: list[dict[str, Any]]) -> ProcessState:
    if "deletionTimestamp" in pod["metadata"]:
        return ProcessState.STOPPED
    if any(
        s.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff" for s in statuses
    ):
        return ProcessState.BACKOFF
    if is_ready(pod):
        return ProcessState.UP
    phase = pod.get("status", {}).get("phase", "")
    words = {"Succeeded": ProcessState.FINISHED, "Failed": ProcessState.FAILED}
    return words.get(phase, ProcessState.STARTING)
