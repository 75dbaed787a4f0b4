"""`weight_sync.transport=stream`: servers without a volume."""

import pytest
from tests.charts.rendering import experiment, named, of_kind, pods, render, render_ci

from areal.config.transports import TRANSPORTS

STREAM = ("--set", "overrides.weight_sync.transport=stream")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_chart_when_a_transport_is_set_then_volume_and_policy_are_as_the_table_of_them_says(name):
    objects = render("--set", f"overrides.weight_sync.transport={name}")
    volumes = {volume["name"] for volume in server(objects).spec["volumes"]}
    assert ("data" in volumes) is TRANSPORTS[name].shared_volume, "areal.remoteWeights"
    policies = {each["metadata"]["name"] for each in of_kind(objects, "NetworkPolicy")}
    assert ("areal-broadcast" in policies) is TRANSPORTS[name].process_group


def server(objects):
    (pod,) = (pod for pod in pods(objects) if pod.component == "sglang")
    return pod


def mounts(pod, name):
    (container,) = (each for each in pod.containers() if each["name"] == name)
    return {mount["name"]: mount for mount in container["volumeMounts"]}


@pytest.mark.parametrize("objects", [render(*STREAM), render_ci("stream-values.yaml")])
def test_servers_when_weights_stream_then_they_mount_no_shared_volume(objects):
    pod = server(objects)
    for volume in pod.spec["volumes"]:
        assert "emptyDir" in volume, volume
    (model,) = (a for a in pod.spec["containers"][0]["args"] if a.startswith("--model-path="))
    assert model == "--model-path=/model"
    store = experiment(objects)["endpoints"]["weight_store"]
    fetch = pod.spec["initContainers"][0]
    version, folder, *wait = fetch["command"][-4:]
    assert (version, folder) == (f"{store}/versions/v00000000-inc0", "/model")
    assert wait == ["--wait", "21600"], "as long as the model may take"
    assert "readOnly" not in mounts(pod, "fetch-model")["model"]


def test_servers_when_weights_are_on_disk_then_they_mount_the_volume_and_have_no_sidecar():
    for objects in (render(), render_ci("gpu-values.yaml")):
        pod = server(objects)
        assert "data" in {volume["name"] for volume in pod.spec["volumes"]}
        assert [container["name"] for container in pod.spec["containers"]] == ["sglang"]


def test_sidecar_when_weights_stream_to_sglang_then_both_see_one_folder_in_memory():
    objects = render_ci("stream-values.yaml")
    pod = server(objects)
    sidecar = pod.spec["containers"][1]
    folder = sidecar["args"][sidecar["args"].index("--folder") + 1]
    assert mounts(pod, "sidecar")["weights"]["mountPath"] == folder
    assert mounts(pod, "sglang")["weights"] == {
        "name": "weights",
        "mountPath": folder,
        "readOnly": True,
    }
    (weights,) = (v for v in pod.spec["volumes"] if v["name"] == "weights")
    assert weights["emptyDir"] == {"medium": "Memory"}
    assert sidecar["ports"] == [{"name": "sidecar", "containerPort": 30900}]
    rule = named(objects, "NetworkPolicy", "areal-weight-sync-to-sglang")["spec"]["ingress"][0]
    assert [port["port"] for port in rule["ports"]] == [30000, 30900]


def test_sidecar_when_the_cpu_engine_pulls_itself_then_there_is_none():
    pod = server(render(*STREAM))
    assert [container["name"] for container in pod.spec["containers"]] == ["sglang"]


def test_store_when_weights_stream_then_trainer_and_servers_may_reach_its_port():
    objects = render(*STREAM)
    port = int(experiment(objects)["endpoints"]["weight_store"].rpartition(":")[2])
    for caller in ("trainer", "sglang"):
        policy = named(objects, "NetworkPolicy", f"areal-{caller}-to-weight-sync")
        (rule,) = policy["spec"]["ingress"]
        assert port in [each["port"] for each in rule["ports"]], caller


def test_redis_when_rendered_then_every_acknowledged_write_is_on_disk():
    (redis,) = (pod for pod in pods(render()) if pod.component == "redis")
    command = " ".join(
        " ".join(c.get("command", []) + c.get("args", [])) for c in redis.containers()
    )
    assert "--appendonly yes" in command
    assert "--appendfsync always" in command
