"""What runs on GPUs gets the CPUs and the memory that go with them; what waits for it does not."""

from __future__ import annotations

import signal

import pytest
import yaml
from tests.charts.rendering import experiment, of_kind, pods, refusal, render, render_ci

from areal.config.experiment import GRPOConfig, build_config
from areal_launch.clusters.kubernetes import allocation_values

DOCUMENTED = ("allocation_mode=sglang:d4+fsdp:d8", "stack.gpus_per_node=8")


def resources(objects, component):
    """Of the component's container; its pods are all the same."""
    found = [
        each["resources"]
        for pod in pods(objects)
        if pod.component == component
        for each in pod.spec["containers"]
    ]
    assert found, component
    assert all(each == found[0] for each in found), component
    return found[0]


def gib(quantity):
    assert quantity.endswith("Gi"), quantity
    return int(quantity.removesuffix("Gi"))


@pytest.mark.parametrize(
    ("setting", "component", "gpus"),
    [
        ("sglang.gpus=1", "sglang", 1),
        ("sglang.gpus=4", "sglang", 4),
        ("trainer.gpusPerPod=8", "trainer", 8),
    ],
)
def test_gpus_when_only_their_number_is_set_then_memory_and_cpus_come_along(
    setting, component, gpus
):
    found = resources(render("--set", setting), component)
    assert found["limits"]["nvidia.com/gpu"] == gpus
    assert gib(found["limits"]["memory"]) >= 64 * gpus
    assert int(found["requests"]["cpu"]) >= 4 * gpus


def test_gpus_when_the_launcher_asks_for_them_then_memory_and_cpus_come_along(tmp_path):
    config = build_config(GRPOConfig, None, [*DOCUMENTED, "model.path=models/m"])
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(allocation_values(config)))
    objects = render("--values", str(file))
    assert gib(resources(objects, "sglang")["limits"]["memory"]) >= 64
    assert gib(resources(objects, "trainer")["limits"]["memory"]) >= 8 * 64


def test_gpus_when_one_quantity_is_given_then_it_wins_and_the_others_stay():
    setting = "sglang.gpus=1,sglang.resources.limits.memory=200Gi"
    found = resources(render("--set", setting), "sglang")
    assert found["limits"] == {"memory": "200Gi", "nvidia.com/gpu": 1}
    assert found["requests"] == {"cpu": "4", "memory": "16Gi"}


def test_cpus_when_no_gpus_are_asked_for_then_the_small_engine_stays_small():
    objects = render()
    assert resources(objects, "sglang") == {
        "requests": {"cpu": "100m", "memory": "512Mi"},
        "limits": {"memory": "4Gi"},
    }
    assert resources(objects, "trainer")["limits"] == {"memory": "8Gi"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [("", 4), ("stack: {gpus_per_node: 8}\n", 8), ("stack:\n", 4), ("seed: 1\n", 4)],
)
def test_experiment_when_the_trainer_has_gpus_then_it_asks_for_them(config, expected, tmp_path):
    """A trainer whose driver or torch build is wrong must end, and not train on the CPUs."""
    file = tmp_path / "values.yaml"
    config = f"model: {{path: models/m}}\n{config}" if config else ""
    file.write_text(yaml.safe_dump({"trainer": {"gpusPerPod": 4}, "config": config}))
    found = experiment(render("--values", str(file)))
    assert found["stack"]["gpus_per_node"] == expected


@pytest.mark.parametrize("gpus", [0, 1])
def test_server_when_it_starts_then_the_kubelet_waits_as_long_as_the_stack(gpus):
    """SGLang compiles kernels at its first start; a pod that is restarted starts over."""
    config = build_config(GRPOConfig, None, [f"stack.gpus_per_node={gpus}"])
    (pod,) = (p for p in pods(render("--set", f"sglang.gpus={gpus}")) if p.component == "sglang")
    probe = pod.spec["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= config.setup_timeout_s


def test_prepare_when_the_trainer_holds_its_devices_then_it_asks_for_none_of_them():
    """Its pod is scheduled at the same time, and waits for prepare with all that it asked for."""
    devices = r"trainer.gpusPerPod=8,trainer.resources.limits.rdma/ib=8"
    objects = render_ci("gpu-values.yaml", "--set", devices)
    assert resources(objects, "trainer")["limits"]["rdma/ib"] == 8
    found = resources(objects, "prepare")
    for kind in ("requests", "limits"):
        assert found[kind].keys() <= {"cpu", "memory", "ephemeral-storage"}
    assert gib(found["requests"]["memory"]) <= 2


def test_prepare_when_a_device_is_asked_for_then_it_is_refused():
    said = refusal("--set", r"prepare.resources.limits.nvidia\.com/gpu=1")
    assert "prepare.resources.limits" in said


def test_sglang_when_prometheus_reads_it_then_upstream_is_told_to_serve_metrics():
    def arguments(*settings):
        (pod,) = (p for p in pods(render(*settings)) if p.component == "sglang")
        return pod.spec["containers"][0]["args"]

    watched = ("--set", "metrics.serviceMonitor=true")
    assert "--enable-metrics" in arguments("--set", "sglang.gpus=1", *watched)
    assert "--enable-metrics" not in arguments("--set", "sglang.gpus=1")
    assert "--enable-metrics" not in arguments(*watched), "the CPU engine knows no such flag"


@pytest.mark.parametrize("gpus", [0, 8])
def test_job_when_a_node_is_preempted_then_it_costs_no_restart(gpus):
    setting = f"trainer.workload=Job,trainer.gpusPerPod={gpus}"
    (job,) = (
        each["spec"]
        for each in of_kind(render("--set", setting), "Job")
        if "completionMode" in each["spec"]
    )
    rules = job["podFailurePolicy"]["rules"]
    condition = {"type": "DisruptionTarget", "status": "True"}
    assert {"action": "Ignore", "onPodConditions": [condition]} in rules
    assert job["podReplacementPolicy"] == "Failed"
    assert ("FailJob" in [rule["action"] for rule in rules]) == (gpus == 0)
    # All ranks exit with 143 if one was asked to stop; torchrun makes every exit code 1.
    stopped = {"containerName": "trainer", "operator": "In", "values": [128 + signal.SIGTERM]}
    assert ({"action": "Ignore", "onExitCodes": stopped} in rules) == (gpus == 0)


@pytest.mark.parametrize("gpus", [0, 8])
def test_trainjob_when_a_node_is_preempted_then_it_costs_no_restart(gpus):
    setting = f"trainer.workload=TrainJob,trainer.gpusPerPod={gpus}"
    (runtime,) = of_kind(render("--set", setting), "TrainingRuntime")
    jobs = runtime["spec"]["template"]["spec"]
    (replicated,) = jobs["replicatedJobs"]
    job = replicated["template"]["spec"]
    condition = {"type": "DisruptionTarget", "status": "True"}
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onPodConditions": [condition]}
    ]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "else the policy is refused"
    (rule,) = jobs["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize(("version", "there"), [("1.26.0", False), ("1.27.0", True)])
def test_budget_when_a_pod_is_not_ready_then_it_keeps_no_node(version, there):
    budgets = of_kind(render("--kube-version", version), "PodDisruptionBudget")
    assert budgets
    for budget in budgets:
        assert (budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow") == there


def test_policies_when_dns_and_api_have_other_ports_then_they_are_open():
    def ports(name, *settings):
        (policy,) = (
            each["spec"]
            for each in of_kind(render(*settings), "NetworkPolicy")
            if each["metadata"]["name"] == name
        )
        return {p["port"] for rule in policy["egress"] for p in rule.get("ports", [])}

    assert {53, 5353} <= ports("areal-inside"), "OpenShift's DNS listens on 5353"
    assert {443, 6443, 8443, 16443} <= ports("areal-weight-sync-to-api")
    assert ports("areal-inside", "--set", "networkPolicy.dnsPorts={1053}") == {1053}
    own = ("--set", "networkPolicy.apiPorts={7443}")
    assert ports("areal-weight-sync-to-api", *own) == {7443}
