"""What a namespace refuses after the install, said before it, with the value to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes_api import ApiServer
from tests.unit.areal_launch.test_kubernetes import (  # the fixture, too
    api,
    diagnose,
    healthy,
    needs_helm,
)

from areal_launch.doctor.admission import Planned, pod_uses, resources_of, shared_class
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


@needs_helm
@pytest.mark.parametrize(
    ("hard", "said"),
    [
        ({"pods": "9"}, "pods needed, 9 left"),
        ({"count__pods": "9"}, "count/pods needed, 9 left"),
        ({"requests_memory": "2Gi"}, "requests.memory needed"),
        ({"memory": "2Gi"}, "memory needed"),
        ({"limits_memory": "9Gi"}, "limits.memory needed"),
        ({"persistentvolumeclaims": "1"}, "2 persistentvolumeclaims needed, 1 left"),
        ({"requests_storage": "10Gi"}, "requests.storage needed"),
        ({"services": "3"}, "services needed, 3 left"),
        ({"count__deployments_apps": "2"}, "count/deployments.apps needed, 2 left"),
        ({"count__jobs_batch": "0"}, "1 count/jobs.batch needed, 0 left"),
    ],
)
def test_quota_when_a_kind_runs_out_then_it_is_named(
    tmp_path: Path, api: ApiServer, hard: dict[str, str], said: str
) -> None:
    healthy(api)
    quota(api, **hard)
    refused = found(tmp_path, "quota")
    assert refused.verdict is CheckResult.MISSING
    assert said in refused.found
    quota(api, **dict.fromkeys(hard, "1000Ti"))
    assert found(tmp_path, "quota").verdict is CheckResult.OK


@needs_helm
def test_quota_when_it_counts_gpus_then_all_of_a_component_count(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    quota(api, **{"requests_nvidia.com__gpu": "4"})
    two = {"gpus": 2, "replicaCount": 2}
    assert found(tmp_path, "quota", sglang=two).verdict is CheckResult.OK
    more = found(tmp_path, "quota", sglang={**two, "replicaCount": 3})
    assert "6 requests.nvidia.com/gpu needed, 4 left" in more.found


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


def found_all(tmp_path: Path) -> str:
    """All that a LimitRange refuses, one component at a time."""
    fits = {"resources": {"limits": {"memory": "2Gi"}}}
    values = dict.fromkeys((*NAMES, "prepare", "nats"), fits)
    return str(found(tmp_path, "limit range", **values).found)


@needs_helm
def test_pod_security_when_the_level_refuses_a_value_then_it_is_named(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    assert found(tmp_path, "pod security").verdict is CheckResult.OK, "there is no namespace yet"
    for level, verdict in (
        ("privileged", CheckResult.OK),
        ("baseline", CheckResult.MISSING),
        ("restricted", CheckResult.MISSING),
    ):
        labels = {"pod-security.kubernetes.io/enforce": level}
        api.answers[LAB] = {"metadata": {"name": "lab", "labels": labels}}
        usual = found(tmp_path, "pod security")
        assert usual.verdict is CheckResult.OK, usual.found
        open_ = found(tmp_path, "pod security", storage={"hostPath": "/data"})
        assert open_.verdict is verdict
        assert ("storage.hostPath" in open_.found) == (verdict is CheckResult.MISSING)
        rdma = {"hostNetwork": True, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
        open_ = found(tmp_path, "pod security", trainer=rdma)
        assert open_.verdict is verdict
        if verdict is CheckResult.MISSING:
            assert "trainer: hostNetwork (set trainer.hostNetwork" in open_.found
            assert "adds IPC_LOCK (see trainer.securityContext" in open_.found


@needs_helm
@pytest.mark.parametrize(
    ("provisioner", "verdict"),
    [
        ("ebs.csi.aws.com", CheckResult.MISSING),
        ("rancher.io/local-path", CheckResult.MISSING),
        ("pd.csi.storage.gke.io", CheckResult.MISSING),
        ("rook-ceph.rbd.csi.ceph.com", CheckResult.MISSING),
        ("efs.csi.aws.com", CheckResult.OK),
        ("rook-ceph.cephfs.csi.ceph.com", CheckResult.OK),
        ("nfs.csi.k8s.io", CheckResult.OK),
        ("filestore.csi.storage.gke.io", CheckResult.OK),
        ("example.com/own", CheckResult.NOTE),
    ],
)
def test_storage_class_when_its_modes_are_known_then_the_value_to_set_is_said(
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
    assert shared_class(listed) is {
        CheckResult.MISSING: False,
        CheckResult.OK: True,
        CheckResult.NOTE: None,
    }.get(verdict)


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
