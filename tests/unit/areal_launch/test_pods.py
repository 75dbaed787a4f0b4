"""How pods are read: their state, and what keeps them from running; as kubelets write it."""

from __future__ import annotations

from typing import Any

import pytest

from areal_launch.clusters.pods import STUCK_S, StuckWatch, problems_of, processes_of, stuck
from areal_launch.processes.supervisor import ProcessState

IMAGE = "registry.example.com/areal/control:0.1.0"
DENIED = (
    f'rpc error: code = NotFound desc = failed to pull and unpack image "{IMAGE}": failed to '
    f"resolve reference: {IMAGE}: not found"
)
REASONS = {
    "ErrImagePull": DENIED,
    "ImagePullBackOff": f'Back-off pulling image "{IMAGE}"',
    "ErrImageNeverPull": f'Container image "{IMAGE}" is not present with pull policy of Never',
    "InvalidImageName": "couldn't parse image name: invalid reference format",
    "CreateContainerConfigError": 'secret "mine" not found',
}


def pod(name: str, phase: str, component: str = "", **status: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase, **status}}


def waiting(name: str, component: str, reason: str, *, init: bool = False) -> dict[str, Any]:
    """A pod one of whose containers waits."""
    container = {
        "name": "wait-for-model" if init else component,
        "image": IMAGE,
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": {"reason": reason, "message": REASONS.get(reason, "")}},
    }
    key = "initContainerStatuses" if init else "containerStatuses"
    return pod(name, "Pending", component, **{key: [container]})


def running(name: str, component: str) -> dict[str, Any]:
    status = {"name": component, "image": IMAGE, "ready": True, "restartCount": 0}
    started = {"running": {"startedAt": "2026-11-22T10:00:00Z"}}
    return pod(name, "Running", component, containerStatuses=[status | {"state": started}])


def test_pods_when_shown_then_each_has_the_state_of_a_process() -> None:
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "Insufficient cpu",
    }
    pods = [
        pod("r-areal-buffer-x", "Running", containerStatuses=[{"ready": True, "restartCount": 2}]),
        pod("r-areal-reward-x", "Running", containerStatuses=[{"ready": False, "state": back_off}]),
        pod("r-areal-trainer-x", "Succeeded", containerStatuses=[{"ready": False}]),
        pod("r-areal-gateway-x", "Pending", conditions=[unschedulable]),
        waiting("r-areal-sglang-x", "sglang", "ImagePullBackOff", init=True),
    ]
    shown = processes_of(pods, "r")
    assert {name: process.state for name, process in shown.items()} == {
        "buffer-x": ProcessState.UP,
        "reward-x": ProcessState.BACKOFF,
        "trainer-x": ProcessState.FINISHED,
        "gateway-x": ProcessState.STARTING,
        "sglang-x": ProcessState.STARTING,
    }
    assert shown["buffer-x"].restarts == 2
    said = {each.pods[0]: str(each) for each in problems_of(pods)}
    assert said.keys() == {"r-areal-reward-x", "r-areal-gateway-x", "r-areal-sglang-x"}
    assert said["r-areal-reward-x"] == "pod r-areal-reward-x: CrashLoopBackOff: back-off"
    assert said["r-areal-gateway-x"] == "pod r-areal-gateway-x: Unschedulable: Insufficient cpu"


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("ErrImagePull", "image.repository"),
        ("ImagePullBackOff", "image.pullSecrets"),
        ("ErrImageNeverPull", "image.pullPolicy"),
        ("InvalidImageName", "image.repository"),
        ("CreateContainerConfigError", "create the Secret"),
    ],
)
@pytest.mark.parametrize("init", [False, True])
def test_pod_when_it_cannot_start_then_pod_image_reason_and_the_way_out_are_named(
    reason: str, mend: str, init: bool
) -> None:
    (problem,) = problems_of([waiting("r-buffer-x", "buffer", reason, init=init)])
    for word in ("r-buffer-x", problem.container, IMAGE, reason, REASONS[reason], mend):
        assert word in str(problem)
    assert stuck([waiting("r-buffer-x", "buffer", reason, init=init)]) == [problem]


def test_pods_when_many_wait_for_one_image_then_it_is_one_line() -> None:
    pods = [waiting(f"sglang-{i}", "sglang", "ErrImagePull") for i in range(64)]
    (problem,) = problems_of(pods)
    assert "pod sglang-0 and 63 more" in str(problem)


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_pod_when_it_is_only_starting_then_nothing_is_wrong(reason: str) -> None:
    assert problems_of([waiting("r-buffer-x", "buffer", reason)]) == []


def test_pod_when_it_is_being_deleted_then_nothing_is_wrong() -> None:
    leaving = waiting("r-buffer-x", "buffer", "ErrImagePull")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-22T10:00:00Z"
    assert problems_of([leaving]) == []


@pytest.mark.parametrize("reason", ["CrashLoopBackOff", "ContainerCreating"])
def test_watch_when_the_cluster_may_get_over_it_then_it_is_never_given_up(reason: str) -> None:
    watch, pods = StuckWatch(), [waiting("r-buffer-x", "buffer", reason)]
    assert not any(watch.look(pods, now) for now in (0.0, STUCK_S, 10 * STUCK_S))


def test_watch_when_an_image_stays_away_then_it_is_given_up_after_a_bounded_while() -> None:
    """Reasons change with each try of the kubelet; it is the same container all the while."""
    watch = StuckWatch()
    now, reasons = 100.0, ["ErrImagePull", "ImagePullBackOff", "ContainerCreating"]
    for turn in range(int(STUCK_S / 3)):
        pods = [waiting("r-buffer-x", "buffer", reasons[turn % 3])]
        assert watch.look(pods, now + 3.0 * turn) is None
    found = watch.look([waiting("r-buffer-x", "buffer", "ErrImagePull")], now + STUCK_S)
    assert found is not None
    assert found[1] == now
    assert IMAGE in str(found[0])


def test_watch_when_it_was_well_in_between_then_the_time_begins_again() -> None:
    watch, broken = StuckWatch(), [waiting("r-buffer-x", "buffer", "ErrImagePull")]
    assert watch.look(broken, 0.0) is None
    assert watch.look([running("r-buffer-x", "buffer")], 3.0) is None
    assert watch.look(broken, STUCK_S) is None


def test_watch_when_another_pod_of_the_component_runs_then_the_run_continues() -> None:
    watch = StuckWatch()
    pods = [running("sglang-a", "sglang"), waiting("sglang-b", "sglang", "ErrImagePull")]
    assert not any(watch.look(pods, 10.0 * turn) for turn in range(100))
