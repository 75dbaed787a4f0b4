"""The sandbox service in a cluster: when it is there, what it may do, and who may call it."""

import pytest
from tests.charts.policies import edges
from tests.charts.rendering import experiment, named, of_kind, pods, refusal, render

BOXES = "overrides.sandbox.boxes=8"
RLIMITS = f"{BOXES},overrides.sandbox.isolation=rlimits"
GVISOR = f"{RLIMITS},sandbox.runtimeClassName=gvisor"


def pod_of(setting):
    objects = render("--set", setting)
    [pod] = [pod for pod in pods(objects) if pod.component == "sandbox"]
    return objects, pod


def test_service_when_the_experiment_lends_boxes_then_it_is_deployed_and_named():
    assert not [pod for pod in pods(render()) if pod.component == "sandbox"]
    assert not experiment(render())["endpoints"].keys() & {"sandbox", "sandbox_http"}
    objects, _ = pod_of(BOXES)
    endpoints = experiment(objects)["endpoints"]
    assert endpoints["sandbox"] == "areal-sandbox:50051"
    assert endpoints["sandbox_http"] == "http://areal-sandbox:8080"


def test_service_when_another_one_is_named_then_that_is_used_and_none_deployed():
    objects = render("--set", f"{BOXES},overrides.endpoints.sandbox=boxes.other:50051")
    assert not [pod for pod in pods(objects) if pod.component == "sandbox"]
    assert experiment(objects)["endpoints"]["sandbox"] == "boxes.other:50051"
    assert not [edge for edge in edges(objects) if "sandbox" in edge]


def test_service_when_replaced_then_two_never_run_side_by_side():
    objects, _ = pod_of(BOXES)
    spec = named(objects, "Deployment", "areal-sandbox")["spec"]
    assert spec["strategy"] == {"type": "Recreate"}
    assert spec["replicas"] == 1
    budgets = of_kind(objects, "PodDisruptionBudget", "HorizontalPodAutoscaler")
    assert not [each for each in budgets if "sandbox" in each["metadata"]["name"]]


def test_namespaces_when_wanted_then_the_pod_may_make_them_and_nothing_else():
    _, pod = pod_of(BOXES)
    assert pod.spec["hostUsers"] is False
    assert "runtimeClassName" not in pod.spec
    context = pod.containers()[0]["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "procMount": "Unmasked",
        "seccompProfile": {"type": "Unconfined"},
        "appArmorProfile": {"type": "Unconfined"},
    }


def test_rlimits_when_wanted_then_the_pod_is_confined_like_all_others():
    _, pod = pod_of(GVISOR)
    assert pod.spec["runtimeClassName"] == "gvisor"
    assert "hostUsers" not in pod.spec
    [buffer] = [pod for pod in pods(render()) if pod.component == "buffer"]
    assert pod.containers()[0]["securityContext"] == buffer.containers()[0]["securityContext"]


def test_rlimits_when_no_runtime_class_is_named_then_it_is_refused():
    assert "set sandbox.runtimeClassName to a RuntimeClass of gVisor" in refusal("--set", RLIMITS)


def test_namespaces_when_the_cluster_has_none_for_pods_then_they_are_refused():
    cluster = ("--kube-version", "1.29.0", "--api-versions", "apps/v1/Deployment")
    known = ("--set", "trainer.workload=Job")
    assert "this cluster is v1.29.0" in refusal("--set", BOXES, *cluster, *known)
    assert render("--set", GVISOR, *cluster, *known)


def test_policies_when_boxes_are_there_then_rollout_and_reward_call_and_nothing_leaves():
    objects, pod = pod_of(BOXES)
    found = {edge for edge in edges(objects) if "sandbox" in edge}
    callers = ("rollout", "reward")
    assert found == {(caller, "sandbox", port) for caller in callers for port in (50051, 8080)}
    for policy in of_kind(objects, "NetworkPolicy"):
        spec = policy["spec"]
        if "egress" in spec:
            assert not chooses(spec["podSelector"], pod.labels), policy["metadata"]["name"]


def chooses(selector, labels):
    """Whether a podSelector chooses a pod with those labels."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for each in selector.get("matchExpressions", []):
        if (labels.get(each["key"]) in each["values"]) != (each["operator"] == "In"):
            return False
    return True


@pytest.mark.parametrize("setting", [BOXES, GVISOR])
def test_container_when_rendered_then_boxes_find_no_process_that_shows_its_environment(setting):
    """A hook or a probe that runs a program in the container has the token in its environment."""
    _, pod = pod_of(f"{setting},tracing.endpoint=http://collector:4317")
    [container] = pod.containers()
    assert "lifecycle" not in container
    probes = [probe for name, probe in container.items() if name.endswith("Probe")]
    assert len(probes) == 3
    assert all("httpGet" in probe for probe in probes)
    assert not [each for each in container["env"] if each["name"].startswith("OTEL_")]
