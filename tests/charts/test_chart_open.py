"""Other people's values: what they set is in the objects, and a typing error has a name."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from tests.charts.rendering import (
    CHART,
    NAMESPACE,
    helm,
    objects_in,
    of_kind,
    pods,
    refusal,
    render,
)
from tests.charts.test_chart_rendering import validate

FOREIGN = yaml.safe_load((Path(__file__).parent / "foreign_values.yaml").read_text())


def objects_of(values, tmp_path, *arguments):
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return render("--values", str(file), *arguments)


@pytest.mark.parametrize("case", FOREIGN, ids=[each["name"] for each in FOREIGN])
def test_values_when_a_person_brings_them_from_elsewhere_then_they_are_in_the_objects(
    case, tmp_path
):
    own = case["values"].get("image", {}).get("repository")
    set_again = ("--set", f"image.repository={own}") if own else ()
    objects = objects_of(case["values"], tmp_path, *set_again)
    text = yaml.dump_all(objects, Dumper=yaml.CSafeDumper, width=10_000)
    usual = render()  # which other tests validate
    for each in objects:
        if each not in usual:
            validate(each, "1.33")
    for shown in case.get("shows", []):
        assert shown in text.replace("'", '"'), shown
    for gone in case.get("absent", []):
        assert not re.search(f"{re.escape(gone)}$", text, re.MULTILINE), gone
    for pod in pods(objects):
        for container in pod.containers():
            if case.get("unsafe"):
                continue
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, (pod.owner, container["name"])
            assert context["capabilities"]["drop"] == ["ALL"]


def test_quota_when_it_limits_cpus_then_no_container_of_the_chart_is_without(tmp_path):
    limits = {"resources": {"limits": {"cpu": "1"}}}
    names = [*("gateway", "rollout", "reward", "buffer", "weightSync", "sglang", "trainer")]
    values = dict.fromkeys([*names, "prepare", "redis", "nats"], limits)
    values["storage"] = values["redis"] | {"hostPath": "/data"}
    values = {**values, "redis": limits | {"hostPath": "/redis"}, "storage": {"hostPath": "/data"}}
    for pod in pods(objects_of(values, tmp_path)):
        for container in pod.containers():
            assert "cpu" in container["resources"]["limits"], (pod.owner, container["name"])


def test_openshift_when_the_cluster_is_one_then_no_pod_has_ids_of_its_own():
    for pod in pods(render("--api-versions", "security.openshift.io/v1")):
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod.spec["securityContext"].keys()
        assert pod.spec["securityContext"]["runAsNonRoot"] is True


def test_listen_address_when_it_is_ipv6_then_no_process_listens_elsewhere(tmp_path):
    text = json.dumps(objects_of({"common": {"listenAddress": "::"}}, tmp_path))
    assert "0.0.0.0" not in text


def test_volume_when_one_node_can_attach_it_then_all_who_mount_it_are_kept_together(tmp_path):
    objects = objects_of({"storage": {"accessMode": "ReadWriteOnce"}}, tmp_path)
    mounting = set()
    for pod in pods(objects):
        if any(v["name"] == "data" and "persistentVolumeClaim" in v for v in pod.spec["volumes"]):
            mounting.add(pod.component)
            assert pod.labels["areal.io/volume"] == "data"
            [term] = pod.spec["affinity"]["podAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            assert term["labelSelector"]["matchLabels"].items() <= pod.labels.items()
        else:
            assert "areal.io/volume" not in pod.labels
    assert mounting == {"trainer", "prepare", "rollout", "weight-sync", "sglang"}


TYPOS = [
    *("gatway.replicaCount=1", "gateway.replicaCont=1", "trainer.gpuPerPod=1"),
    *("sglang.gpu=1", "trainer.prioritClassName=x", "common.podLabel.a=b", "comon.labels.a=b"),
    *("storage.acessMode=ReadWriteOnce", "storage.existingclaim=x", "image.repositry=x"),
    *("image.tags=x", "sglang.extraArg={a}", "reward.resources.limit.cpu=1", "redis.external=x"),
    *("gateway.ingress.enable=true", "gateway.service.typ=NodePort", "sglang.pdb.maxUnavailble=1"),
    *("trainer.serviceAccount.anotations.a=b", "prepare.sources=x", "networkPolicy.enable=false"),
    *("common.proxy.htps=x", "common.caBundle.configmap=x", "sglang.autoscaling.minReplica=1"),
    *("overrides.total_train_stps=5", "overrides.modle.path=x", "overrides.actor.lrr=1"),
    *("overrides.rollout.max_concurent_rollouts=5", "overrides.weight_sync.transprt=stream"),
    *("overrides.gconfig.n_sample=4", "overrides.actor.optimizer.lrs=1"),
    *("metrics.serviceMonitors=true", "rbac.creat=false", "tracing.endpont=x"),
]


@pytest.mark.parametrize("setting", TYPOS)
def test_values_when_a_letter_is_wrong_then_the_key_is_named(setting):
    said = refusal("--set", setting)
    key = setting.partition("=")[0]
    wrong = next(part for part in key.split(".") if part not in ALL_KEYS)
    assert wrong in said


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("reward.autoscaling.pollingInterval=5", "type is HPA: set reward.autoscaling.type=Scaled"),
        ("weightSync.serviceAccount.create=false", "set weightSync.serviceAccountName"),
        ("gateway.httpRoute.enabled=true", "parentRefs is empty: name the Gateway"),
        ("gateway.ingress.enabled=true,gateway.ingress.tls=true", "hostname is empty"),
        ("prepare.service.annotations.a=b", "service is not allowed"),
        ("trainer.serviceAccount.automount=true", "automount is not allowed"),
    ],
)
def test_values_when_they_would_be_ignored_then_a_sentence_says_so(setting, sentence):
    assert sentence in refusal("--set", setting)


def keys_of(node):
    if isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from keys_of(value)
    elif isinstance(node, list):
        for each in node:
            yield from keys_of(each)


ALL_KEYS = {
    *keys_of(json.loads((CHART / "values.schema.json").read_text())),
    *(
        part
        for key in [
            *json.loads((CHART / "files" / "keys.json").read_text())["values"],
            *json.loads((CHART / "files" / "keys.json").read_text())["sections"],
        ]
        for part in key.split(".")
    ),
}


@pytest.mark.parametrize(
    ("config", "wrong"),
    [("totl_train_steps: 3", "totl_train_steps"), ("actor: {optimizer: {lrr: 1}}", "lrr")],
)
def test_config_when_it_has_a_wrong_key_then_it_is_named(config, wrong, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {{path: models/m}}\n{config}\n")
    assert f".{wrong}: unknown key; expected one of" in refusal("--set-file", f"config={file}")


def test_config_when_the_recipe_has_a_key_of_its_own_then_it_is_not_refused(tmp_path):
    recipe, config = tmp_path / "recipe.py", tmp_path / "config.yaml"
    recipe.write_text("class Config(GRPOConfig):\n    digits: int = 2\n")
    config.write_text("model: {path: models/m}\ndigits: 3\n")
    files = ("--set-file", f"recipe={recipe}", "--set-file", f"config={config}")
    assert render(*files, "--set", "overrides.digits=4")
    assert "config.digit" in refusal(
        *files[:2], "--set-string", "config=model: {path: m/m}\ndigit: 3"
    )


WORKLOADS = ("Job", "PyTorchJob", "TrainJob")


def jobs(objects):
    """Name to spec of what cannot be changed."""
    kinds = ("Job", "PyTorchJob", "TrainJob", "TrainingRuntime")
    return {(o["kind"], o["metadata"]["name"]): o["spec"] for o in of_kind(objects, *kinds)}


def other_values(node, path=()):
    """Each leaf of the values with another value of its type."""
    for key, value in node.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            yield from other_values(value, here)
        elif isinstance(value, bool):
            yield here, not value
        elif isinstance(value, int):
            yield here, value + 1
        elif isinstance(value, str):
            yield here, OTHER_TEXTS.get(here[-1], f"{value}1" if value else "x1")
        elif isinstance(value, dict) and key != "resources":
            yield here, {"a": "b"}


OTHER_TEXTS = {
    "accessMode": "ReadWriteOnce",
    "hostPath": "/folder",
    "size": "7Gi",
    "memory": "7Gi",
    "cpu": "3",
    "ephemeral-storage": "7Gi",
    "type": "NodePort",
    "shmSize": "1Gi",
    "ipFamilyPolicy": "SingleStack",
    "pullPolicy": "Always",
    "source": "hf://a/b",
    "config": "model: {path: models/m}",
    "externalUrl": "",
    "endpoint": "http://collector:4317",
    "http": "http://proxy:1",
    "https": "http://proxy:1",
    "workload": "Job",
    "metric": "cpu",
}
NOT_ALONE = {"enabled", "overrides", "global", "workload", "type", "references"}


@pytest.mark.long
@pytest.mark.parametrize("workload", WORKLOADS)
def test_job_when_any_value_changes_then_the_same_name_means_the_same_pods(workload, tmp_path):
    """A Job's pods cannot be changed, and operators ignore a change."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chosen = ("--set", f"trainer.workload={workload}")
    before = jobs(render(*chosen))
    renamed = 0
    interesting = ("prepare", "trainer", "storage", "image", "auth", "tls", "common", "tracing")
    for path, value in other_values({key: values[key] for key in interesting}):
        if path[-1] in NOT_ALONE:
            continue
        changed: dict = {}
        part = changed
        for key in path[:-1]:
            part = part.setdefault(key, {})
        part[path[-1]] = value
        file = tmp_path / f"{'-'.join(path)}.yaml"
        file.write_text(yaml.safe_dump(changed))
        after = jobs(render("--values", str(file), *chosen))
        for name, spec in after.items():
            if name in before:
                assert spec == before[name], (path, name)
        renamed += after.keys() != before.keys()
    assert renamed > 30, "the values that reach the pods"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_chart_when_only_its_version_changes_then_no_pod_does(workload, tmp_path):
    chart = tmp_path / "areal"
    shutil.copytree(CHART, chart)
    bumped = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"(?m)^version: .*$", "version: 99.0.0", bumped))
    images = ("--set", f"image.repository=registry.example.com/areal,trainer.workload={workload}")
    done = helm("template", "areal", str(chart), "--namespace", NAMESPACE, *images)
    assert done.returncode == 0, done.stderr
    after = objects_in(done.stdout)
    before = render("--set", f"trainer.workload={workload}")
    assert "areal-99.0.0" in done.stdout
    assert jobs(after) == jobs(before)
    for kind in ("Deployment", "StatefulSet"):
        assert [o["spec"] for o in of_kind(after, kind)] == [
            o["spec"] for o in of_kind(before, kind)
        ]


def test_chart_when_rendered_twice_with_secrets_that_exist_then_it_is_the_same(tmp_path):
    own = ("--set", "auth.existingSecret=mine")
    first = copy.deepcopy(render(*own))
    render.cache_clear()
    assert render(*own) == first
