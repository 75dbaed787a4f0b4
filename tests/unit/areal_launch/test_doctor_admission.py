"""What a namespace refuses after the install, said before it, with the value to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.charts.rendering import pods, render
from tests.kubernetes_api import ApiServer
from tests.unit.areal_launch.test_kubernetes import (  # the fixture, too
    api,
    diagnose,
    healthy,
    needs_helm,
)

from areal_launch.doctor.admission import (
    Planned,
    outside_ranges,
    pod_security_problems,
    pod_uses,
    quota_problems,
    range_entries,
    resources_of,
    shared_class,
)
from areal_launch.view.output import CheckResult

__all__ = ["api"]
LAB = "/api/v1/namespaces/lab"
IMAGES = {"image": {"repository": "registry.example.com/areal"}}
NAMES = ("gateway", "rollout", "reward", "buffer", "weightSync", "sglang", "trainer")


def found(tmp_path: Path, name: str, **values: Any) -> Any:
    """One finding of the doctor, for a chart with these values."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({**IMAGES, **values}))
    return diagnose(tmp_path, f"stack.kubernetes.values=[{file}]")[name]


def quota(api: ApiServer, **hard: str) -> None:
    hard = {key.replace("__", "/").replace("_", "."): value for key, value in hard.items()}
    status = {"hard": hard, "used": dict.fromkeys(hard, "0")}
    item = {"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": status}
    api.answers[f"{LAB}/resourcequotas"] = {"items": [item]}


def limit_range(api: ApiServer, **entry: Any) -> None:
    item = {"metadata": {"name": "d"}, "spec": {"limits": [{"type": "Container", **entry}]}}
    api.answers[f"{LAB}/limitranges"] = {"items": [item]}


@needs_helm
def test_quota_when_it_limits_cpus_then_each_container_without_a_limit_names_its_value(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    quota(api, limits_cpu="100")
    refused = found(tmp_path, "quota")
    assert refused.verdict is CheckResult.MISSING
    assert "buffer/buffer has none: set buffer.resources.limits.cpu" in refused.found
    limited = {name: {"resources": {"limits": {"cpu": "1"}}} for name in (*NAMES, "redis", "nats")}
    limited["prepare"] = limited["redis"]
    assert found(tmp_path, "quota", **limited).verdict is CheckResult.OK
    limit_range(api, default={"cpu": "1"}, defaultRequest={"cpu": "100m"})
    assert found(tmp_path, "quota").verdict is CheckResult.OK, "the LimitRange fills the gaps"


POD = {
    "initContainers": [
        {"name": "wait", "resources": {"limits": {"cpu": "1", "memory": "256Mi"}}},
    ],
    "containers": [
        {
            "name": "trainer",
            "resources": {
                "requests": {"cpu": "200m", "memory": "1Gi"},
                "limits": {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": 2},
            },
        }
    ],
}
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}
OBJECTS: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "Service"},
    {"apiVersion": "v1", "kind": "Secret"},
    {"apiVersion": "apps/v1", "kind": "Deployment"},
    {"apiVersion": "batch/v1", "kind": "Job"},
    {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"},
    {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": CLAIM},
    {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "spec": {"volumeClaimTemplates": [{"spec": {**CLAIM, "storageClassName": "fast"}}]},
    },
]


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        ("pods", 3),
        ("count/pods", 3),
        ("requests.cpu", 3),  # an init container that limits CPUs requests as many
        ("cpu", 3),
        ("requests.memory", 3 * 2**30),
        ("limits.cpu", 6),
        ("limits.memory", 24 * 2**30),
        ("requests.nvidia.com/gpu", 6),
        ("persistentvolumeclaims", 2),
        ("requests.storage", 40 * 2**30),
        ("fast.storageclass.storage.k8s.io/requests.storage", 20 * 2**30),
        ("fast.storageclass.storage.k8s.io/persistentvolumeclaims", 1),
        ("services", 1),
        ("secrets", 1),
        ("count/deployments.apps", 1),
        ("count/jobs.batch", 1),
        ("count/networkpolicies.networking.k8s.io", 1),
        ("count/persistentvolumeclaims", 1),
    ],
)
def test_quota_when_a_kind_runs_out_then_it_is_named(key: str, needed: int) -> None:
    pods = [Planned("trainer", 3, POD)]

    def problems(hard: str, used: str = "0") -> list[str]:
        status = {"hard": {key: hard}, "used": {key: used}}
        quota = {"metadata": {"name": "team"}, "status": status}
        return quota_problems(quota, pods, OBJECTS, [])

    assert problems(str(needed)) == []
    assert problems(str(needed + 5), "5") == []
    (said,) = problems(str(needed + 5), "6")
    amount = f"{needed >> 30}Gi" if needed >= 2**30 else f"{needed:g}"
    assert said.startswith(f"team: {amount} {key} needed, ")
    scoped = {"metadata": {"name": "s"}, "spec": {"scopes": ["BestEffort"], "hard": {key: "0"}}}
    assert quota_problems(scoped, pods, OBJECTS, []) == []


@needs_helm
def test_limit_range_when_a_container_is_outside_then_its_value_is_named(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    assert found(tmp_path, "limit range").verdict is CheckResult.OK
    limit_range(api, max={"memory": "3Gi"})
    refused = found(tmp_path, "limit range", buffer={"resources": {"limits": {"memory": "1Gi"}}})
    assert refused.verdict is CheckResult.MISSING
    assert "redis.resources.limits.memory" in refused.found + found_all(tmp_path)
    assert "buffer/" not in refused.found
    limit_range(api, min={"cpu": "20m"})
    refused = found(tmp_path, "limit range")
    assert "set common.initResources.requests.cpu" in refused.found


LIMITED = {"requests": {"cpu": "50m", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "3Gi"}}


@pytest.mark.parametrize(
    ("kind", "entry", "said"),
    [
        ("Container", {"maxLimitRequestRatio": {"cpu": "40"}}, ""),
        (
            "Container",
            {"maxLimitRequestRatio": {"cpu": "10", "memory": "3"}},
            "buffer/one has a limit of 2 for a request of 50m of cpu, and at most 10 times the "
            "request is allowed: set buffer.resources.requests.cpu",
        ),
        (
            "Container",
            {"maxLimitRequestRatio": {"memory": "2"}},
            "of 3Gi for a request of 1Gi of m",
        ),
        ("Pod", {"max": {"cpu": "4", "memory": "6Gi"}, "min": {"cpu": "100m"}}, ""),
        (
            "Pod",
            {"max": {"memory": "5Gi"}},
            "buffer's pod has a limit of 6Gi of memory, and at most 5Gi is allowed: set "
            "buffer.resources.limits.memory",
        ),
        (
            "Pod",
            {"min": {"cpu": "200m"}},
            "buffer's pod has a request of 100m of cpu, and at least",
        ),
        (
            "Pod",
            {"maxLimitRequestRatio": {"cpu": "39"}},
            "a limit of 4 for a request of 100m of cpu",
        ),
        ("Pod", {"max": {"nvidia.com/gpu": "1"}}, "has no limit of nvidia.com/gpu"),
    ],
)
def test_limit_range_when_it_is_about_ratios_or_pods_then_what_it_refuses_is_said(
    kind: str, entry: dict[str, Any], said: str
) -> None:
    spec = {"containers": [{"name": name, "resources": LIMITED} for name in ("one", "two")]}
    ranges = [{"spec": {"limits": [{"type": kind, **entry}]}}]
    entries = [range_entries(ranges, each) for each in ("Container", "Pod")]
    problems = outside_ranges([Planned("buffer", 1, spec)], *entries)
    assert len(problems) == (0 if not said else 2 if kind == "Container" else 1)
    assert all(said.replace("/one", "") in each.replace("/one", "") for each in problems[:1])


def test_quota_when_a_kind_runs_out_then_its_amounts_have_units() -> None:
    spec = {"containers": [{"name": "one", "resources": LIMITED}]}
    hard = {"limits.memory": "4Gi", "requests.cpu": "1", "limits.cpu": "2500m", "pods": "2"}
    quota = {"metadata": {"name": "team"}, "spec": {"hard": hard}}
    assert quota_problems(quota, [Planned("buffer", 3, spec)], [], []) == [
        "team: 9Gi limits.memory needed, 4Gi left",
        "team: 6 limits.cpu needed, 2.5 left",
        "team: 3 pods needed, 2 left",
    ]


def found_all(tmp_path: Path) -> str:
    """All that a LimitRange refuses, one component at a time."""
    fits = {"resources": {"limits": {"memory": "2Gi"}}}
    values = dict.fromkeys((*NAMES, "prepare", "nats"), fits)
    return str(found(tmp_path, "limit range", **values).found)


def planned(*arguments: str) -> list[Planned]:
    """The chart's pods but those of its tests."""
    found = pods(render(*arguments))
    return [Planned(pod.component, 1, pod.spec) for pod in found if pod.component != "test"]


RDMA = "trainer.hostNetwork=true,trainer.securityContext.capabilities.add={IPC_LOCK}"


@pytest.mark.parametrize("level", ["baseline", "restricted"])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("trainer.replicaCount=1", []),
        ("storage.hostPath=/data", ["rollout: a volume of kind hostPath (without storage.host"]),
        ("redis.hostPath=/data", ["redis: a volume of kind hostPath (without redis.hostPath)"]),
        (RDMA, ["hostNetwork (set trainer.host", "pytorch adds IPC_LOCK (see trainer.security"]),
        ("buffer.securityContext.privileged=true", ["buffer: buffer is privileged"]),
        (
            "buffer.podSecurityContext.seccompProfile.type=Unconfined",
            ["buffer: buffer is unconfined"],
        ),
    ],
)
def test_pod_security_when_the_level_refuses_a_value_then_it_is_named(
    level: str, values: str, said: list[str]
) -> None:
    space = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}}
    found_level, problems = pod_security_problems(space, planned("--set", values))
    assert found_level == level
    assert bool(problems) == bool(said)
    for each in said:
        assert each in "; ".join(problems)
    assert pod_security_problems({"metadata": {}}, planned("--set", values))[1] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("buffer.podSecurityContext.runAsNonRoot=false", "buffer may run as root"),
        ("buffer.securityContext.allowPrivilegeEscalation=true", "buffer may gain privileges"),
        ("buffer.securityContext.capabilities.drop={KILL}", "buffer keeps capabilities"),
        ("buffer.podSecurityContext.seccompProfile.type=", "buffer has no seccompProfile"),
    ],
)
def test_pod_security_when_only_restricted_refuses_a_value_then_baseline_does_not(
    values: str, said: str
) -> None:
    spaces = [
        {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}}
        for level in ("baseline", "restricted")
    ]
    baseline, restricted = (pod_security_problems(s, planned("--set", values))[1] for s in spaces)
    assert baseline == []
    assert f"buffer: {said}" in "; ".join(restricted)


@needs_helm
def test_pod_security_when_the_namespace_has_a_level_then_the_doctor_reads_it(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.answers[LAB] = {"metadata": {"name": "lab", "labels": labels}}
    assert found(tmp_path, "pod security").found == "the namespace enforces restricted"
    refused = found(tmp_path, "pod security", storage={"hostPath": "/data"})
    assert refused.verdict is CheckResult.MISSING
    assert "without storage.hostPath" in refused.found


@pytest.mark.parametrize(
    ("provisioner", "shared"),
    [
        ("ebs.csi.aws.com", False),
        ("kubernetes.io/aws-ebs", False),
        ("rancher.io/local-path", False),
        ("pd.csi.storage.gke.io", False),
        ("disk.csi.azure.com", False),
        ("cinder.csi.openstack.org", False),
        ("rook-ceph.rbd.csi.ceph.com", False),
        ("kubernetes.io/no-provisioner", False),
        ("efs.csi.aws.com", True),
        ("file.csi.azure.com", True),
        ("rook-ceph.cephfs.csi.ceph.com", True),
        ("nfs.csi.k8s.io", True),
        ("filestore.csi.storage.gke.io", True),
        ("example.com/own", None),
        ("", None),
    ],
)
def test_storage_class_when_its_provisioner_is_known_then_so_are_its_modes(
    provisioner: str, shared: bool | None
) -> None:
    assert shared_class({"provisioner": provisioner}) is shared


@needs_helm
@pytest.mark.parametrize(
    ("provisioner", "verdict"),
    [
        ("ebs.csi.aws.com", CheckResult.MISSING),
        ("efs.csi.aws.com", CheckResult.OK),
    ],
)
def test_storage_class_when_one_node_mounts_it_then_the_value_to_set_is_said(
    tmp_path: Path, api: ApiServer, provisioner: str, verdict: CheckResult
) -> None:
    healthy(api)
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"}
    listed = {"metadata": {"name": "c", "annotations": annotations}, "provisioner": provisioner}
    api.answers["/apis/storage.k8s.io/v1/storageclasses"] = {"items": [listed]}
    many = found(tmp_path, "storage class")
    assert many.verdict is verdict
    if verdict is CheckResult.MISSING:
        assert "storage.accessMode=ReadWriteOnce" in many.fix
        once = found(tmp_path, "storage class", storage={"accessMode": "ReadWriteOnce"})
        assert once.verdict is CheckResult.OK


@needs_helm
def test_doctor_when_the_trainer_is_a_train_job_then_its_pods_count(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    quota(api, **{"requests_nvidia.com__gpu": "7"})
    trainer = {"workload": "TrainJob", "gpusPerPod": 4, "replicaCount": 2}
    assert (
        "8 requests.nvidia.com/gpu needed, 7 left"
        in found(tmp_path, "quota", trainer=trainer).found
    )


def test_secret_when_its_key_is_optional_then_the_doctor_does_not_miss_it(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    keys = ("token", "redis-password", "nats-token")
    api.answers[f"{LAB}/secrets/mine"] = {"data": dict.fromkeys(keys, "eA==")}
    assert found(tmp_path, "secrets", auth={"existingSecret": "mine"}).verdict is CheckResult.OK


def test_pod_when_it_has_init_containers_then_the_largest_counts() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "initContainers": [container("3"), container("2"), container("1", restartPolicy="Always")],
        "containers": [container("500m"), container("500m")],
    }
    assert pod_uses(spec)["requests.cpu"] == 3
    spec["initContainers"] = spec["initContainers"][1:]
    assert pod_uses(spec)["requests.cpu"] == 2
    assert Planned("weight-sync", 1, spec).key == "weightSync"


@pytest.mark.parametrize(
    ("own", "requests", "limits"),
    [
        ({}, {"cpu": 0.1}, {"cpu": 2.0}),
        ({"limits": {"cpu": "1"}}, {"cpu": 1.0}, {"cpu": 1.0}),
        ({"requests": {"cpu": "1"}}, {"cpu": 1.0}, {"cpu": 2.0}),
    ],
)
def test_resources_when_they_have_gaps_then_the_api_fills_them_in_this_order(
    own: dict[str, Any], requests: dict[str, float], limits: dict[str, float]
) -> None:
    entry = {"type": "Container", "default": {"cpu": "2"}, "defaultRequest": {"cpu": "100m"}}
    assert resources_of({"resources": own}, [entry]) == {"requests": requests, "limits": limits}
