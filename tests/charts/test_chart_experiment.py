"""The experiment file in a cluster is the one of `areal run`, and what changes with it."""

import re

import pytest
import yaml
from tests.charts.rendering import (
    CHART,
    CI,
    ROOT,
    experiment,
    named,
    of_kind,
    pods,
    render,
    render_ci,
)

from areal.config.experiment import GRPOConfig, build_config, load_service_config


@pytest.mark.parametrize("values", CI)
def test_experiment_when_rendered_then_every_service_can_read_it(values, tmp_path):
    text = named(render_ci(values), "ConfigMap", "areal-config")["data"]["config.yaml"]
    file = tmp_path / "config.yaml"
    file.write_text(text)
    config = load_service_config(file)
    assert config.endpoints.buffer == "areal-buffer:50051"
    assert config.recipe == "/etc/areal/recipe/recipe.py"


def test_experiment_when_rendered_then_it_is_the_example_with_endpoints(tmp_path):
    example = build_config(GRPOConfig, ROOT / "examples" / "arithmetic_grpo.yaml")
    file = tmp_path / "config.yaml"
    text = named(render(), "ConfigMap", "areal-config")["data"]["config.yaml"]
    file.write_text(text)
    rendered = load_service_config(file)
    rendered.endpoints, rendered.recipe = example.endpoints, example.recipe
    assert rendered == example


def test_experiment_when_given_with_set_file_then_overrides_win_over_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "experiment_name: mine\nseed: 1234567\nmodel: {path: 'm/${seed}/x'}\n"
        "train_dataset: {batch_size: 67108864}\n"
        "gconfig: {n_samples: 4, temperature: 0.7}\n"
    )
    objects = render(
        *("--set-file", f"config={file}", "--set", "overrides.gconfig.n_samples=2"),
    )
    config = experiment(objects)
    assert config["gconfig"] == {"n_samples": 2, "temperature": 0.7}
    assert config["train_dataset"]["batch_size"] == 67108864
    (pod,) = [p for p in pods(objects) if p.component == "sglang"]
    assert "--model-path=/data/m/1234567/x" in pod.spec["containers"][0]["args"]


def test_chart_when_its_example_is_compared_then_it_is_the_one_of_examples():
    for name in ("arithmetic_grpo.py", "arithmetic_grpo.yaml"):
        copied = (CHART / "files" / name).read_text()
        assert copied == (ROOT / "examples" / name).read_text(), "run `make manifests`"


def names_of(kind, *arguments):
    return {each["metadata"]["name"] for each in of_kind(render(*arguments), kind)}


def test_trainer_job_when_recipe_or_config_change_then_its_name_does(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def main(argv):\n    pass\n")
    before = names_of("PyTorchJob")
    assert before != names_of("PyTorchJob", "--set-file", f"recipe={recipe}")
    assert before != names_of("PyTorchJob", "--set", "overrides.seed=1")
    assert before != names_of("PyTorchJob", "--set", "trainer.replicaCount=2")
    assert before == names_of("PyTorchJob", "--set", "sglang.replicaCount=7,reward.replicaCount=2")
    (name,) = before
    assert re.fullmatch(r"areal-trainer-[0-9a-f]{8}", name)


def test_services_when_only_the_recipe_changes_then_their_pods_stay(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def main(argv):\n    pass\n")
    before, after = render(), render("--set-file", f"recipe={recipe}")
    for deployment in of_kind(before, "Deployment", "StatefulSet"):
        name = deployment["metadata"]["name"]
        assert deployment == named(after, deployment["kind"], name)


def test_services_when_the_config_changes_then_their_pods_are_replaced():
    before, after = render(), render("--set", "overrides.rollout.lease_ttl_s=10")
    for name in ("areal-buffer", "areal-rollout", "areal-reward", "areal-gateway"):
        assert named(before, "Deployment", name) != named(after, "Deployment", name)


def test_trainer_when_workloads_differ_then_each_tells_the_ranks_who_they_are():
    two = ("--set", "trainer.replicaCount=2,trainer.backoffLimit=5")
    job = of_kind(render(*two), "PyTorchJob")[0]["spec"]
    assert {k: v["replicas"] for k, v in job["pytorchReplicaSpecs"].items()} == {
        "Master": 1,
        "Worker": 1,
    }
    assert job["runPolicy"]["backoffLimit"] == 10, "each pod's restarts are counted"

    indexed = render(*two, "--set", "trainer.workload=Job")
    (name,) = [
        o["metadata"]["name"]
        for o in of_kind(indexed, "Job")
        if "trainer" in str(o["spec"]["template"]["metadata"]) and "completionMode" in o["spec"]
    ]
    job = named(indexed, "Job", name)["spec"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    (container,) = job["template"]["spec"]["containers"]
    variables = {v["name"]: v.get("value") for v in container["env"]}
    ranks = job["template"]["spec"]["subdomain"]
    assert variables["MASTER_ADDR"] == f"{name}-0.{ranks}"
    assert variables["WORLD_SIZE"] == "2"
    assert named(indexed, "Service", ranks)["spec"]["publishNotReadyAddresses"] is True

    trainjob = render(*two, "--set", "trainer.workload=TrainJob,trainer.gpusPerPod=4")
    spec = of_kind(trainjob, "TrainJob")[0]["spec"]
    runtime = named(trainjob, "TrainingRuntime", spec["runtimeRef"]["name"])
    assert spec["trainer"] == {"numNodes": 2, "numProcPerNode": 4}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "torch.distributed.run"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_gpus_when_asked_for_then_upstream_sglang_runs_with_a_key_from_a_file():
    (pod,) = [p for p in pods(render_ci("gpu-values.yaml")) if p.component == "sglang"]
    (container,) = pod.spec["containers"]
    assert container["image"].startswith("lmsysorg/sglang:v")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "--tp=2" in container["args"]
    assert "--dtype=bfloat16" in container["args"], "left open: 16 bits on GPUs"
    assert container["command"][-2:] == ["--config", "/run/areal/sglang.yaml"]
    assert pod.spec["readinessGates"] == [{"conditionType": "areal.io/weights-current"}]


def test_scaled_object_when_asked_for_then_it_queries_our_metric():
    objects = render_ci("everything-values.yaml")
    spec = named(objects, "ScaledObject", "areal-reward")["spec"]
    assert spec["maxReplicaCount"] == 32
    (trigger,) = spec["triggers"]
    assert trigger["type"] == "prometheus"
    assert (
        trigger["metadata"]["query"]
        == 'sum(areal_reward_waiting_items{namespace="tests",service="areal-reward"})'
    )
    scaler = named(objects, "HorizontalPodAutoscaler", "areal-gateway")
    assert scaler["apiVersion"] == "autoscaling/v2"


METRIC = re.compile(r"\bareal_[a-z_]+[a-z]")


def test_alerts_and_dashboard_when_read_then_their_metrics_exist():
    alerts = (CHART / "files" / "alerts.yaml").read_text()
    dashboard = (CHART / "dashboards" / "areal.json").read_text()
    page = (ROOT / "docs" / "metrics.md").read_text()  # generated from what services export
    known = set(METRIC.findall(page))
    services = set(re.findall(r"^### (areal_\w+)$", page, re.MULTILINE))
    known |= {
        name.replace("areal_SERVICE", service)
        for name in re.findall(r"\bareal_SERVICE_[a-z_]+", page)
        for service in services
    }
    for name in set(METRIC.findall(alerts + dashboard)):
        plain = re.sub(r"_(bucket|count|sum)$", "", name)
        assert plain in known, name


def test_dashboard_when_read_then_it_shows_what_training_costs():
    shown = (CHART / "dashboards" / "areal.json").read_text()
    costs = ("tokens_per_second", "mfu_ratio", "peak_memory_gib", "forward_seconds")
    for name in (*costs, "backward_seconds", "optimizer_seconds", "step_seconds"):
        assert f"areal_trainer_{name}{{" in shown, name


def test_alerts_when_rendered_then_each_names_a_runbook_that_is_there():
    (rule,) = of_kind(render_ci("everything-values.yaml"), "PrometheusRule")
    alerts = [alert for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert len(alerts) >= 6
    for alert in alerts:
        assert 'namespace="tests"' in alert["expr"], alert["alert"]
        assert (ROOT / alert["annotations"]["runbook"]).is_file(), alert["alert"]


def test_dashboard_when_rendered_then_it_is_the_file_that_compose_uses():
    objects = render_ci("everything-values.yaml")
    data = named(objects, "ConfigMap", "areal-dashboard")["data"]["areal.json"]
    assert yaml.safe_load(data)["title"] == "AReaL"
    assert yaml.safe_load(data) == yaml.safe_load((CHART / "dashboards/areal.json").read_text())
