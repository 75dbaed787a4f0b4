"""What helm and kubectl are told, and how a cluster's answers are read."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import ArealError, ConfigError
from areal_launch.clusters.kubernetes import (
    Release,
    allocation_values,
    experiment_to_send,
)
from areal_launch.doctor.kubernetes import ClusterDoctor, quantity
from areal_launch.doctor.local import Verdict, examine_here

ROOT = Path(__file__).resolve().parents[3]
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm; make setup brings it")


class FakeKubectl:
    """A kubectl that answers from a folder: the file named as its arguments, joined by `_`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.program = folder / "kubectl"
        self.program.write_text(
            f"#!/bin/sh\nname=$(echo \"$*\" | sed 's/^-n [a-z]* //' | tr ' /' '__')\n"
            f'echo "$*" >> {folder}/calls\n'
            f'if [ -f "{folder}/$name" ]; then exec cat "{folder}/$name"; fi\n'
            'echo "error: no such object: $name" >&2\nexit 1\n'
        )
        self.program.chmod(0o755)

    def answer(self, arguments: str, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (self.folder / arguments.replace(" ", "_").replace("/", "_")).write_text(text)


def make(tmp_path: Path, *overrides: str) -> GRPOConfig:
    config = build_config(
        GRPOConfig,
        None,
        [
            f"stack.kubernetes.chart={ROOT / 'charts' / 'areal'}",
            f"stack.kubernetes.helm={HELM}",
            "stack.kubernetes.namespace=lab",
            "model.path=models/tiny",
            *overrides,
        ],
    )
    if not config.stack.kubernetes.values:
        images = tmp_path / "images.yaml"
        images.write_text("image: {repository: registry.example.com/areal}\n")
        config.stack.kubernetes.values = [str(images)]
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def main(argv): pass\n")
    config.recipe = str(recipe)
    return config


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))  # helm looks for a cluster by itself
    return FakeKubectl(tmp_path / "bin")


@pytest.mark.parametrize(
    ("overrides", "sglang", "trainer"),
    [
        (
            ["allocation_mode=sglang:d3+fsdp:d2"],
            {"replicaCount": 3, "gpus": 0},
            {"replicaCount": 2, "gpusPerPod": 0},
        ),
        (
            ["allocation_mode=sglang:d2t4+fsdp:d16", "stack.gpus_per_node=8"],
            {"replicaCount": 2, "gpus": 4},
            {"replicaCount": 2, "gpusPerPod": 8},
        ),
        (
            ["allocation_mode=sglang:d2+fsdp:d1", "endpoints.inference=[http://gpu:30000]"],
            {"enabled": False},
            {"replicaCount": 1, "gpusPerPod": 0},
        ),
    ],
)
def test_values_when_allocated_then_pods_and_gpus_follow(
    tmp_path: Path, overrides: list[str], sglang: dict[str, int], trainer: dict[str, int]
) -> None:
    values = allocation_values(make(tmp_path, *overrides))
    assert values["sglang"] == sglang
    assert values["trainer"] == trainer


def test_experiment_when_sent_then_only_what_was_chosen_goes(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "gconfig.n_samples=4",
        "stack.gpus_per_node=8",
        "stack.rollout_workers=2",
        "actor.optimizer.lr=0.5",
    )
    sent = yaml.safe_load(experiment_to_send(config))
    assert sent == {
        "model": {"path": "models/tiny"},
        "gconfig": {"n_samples": 4},
        "stack": {"rollout_workers": 2},
        "actor": {"optimizer": {"lr": 0.5}},
    }
    file = tmp_path / "sent.yaml"
    file.write_text(yaml.safe_dump(sent))
    again = build_config(GRPOConfig, file, [])
    assert again.gconfig == config.gconfig
    assert again.actor == config.actor


@needs_helm
def test_release_when_rendered_by_helm_then_names_come_from_the_chart(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("image: {tag: dev}\ntrainer: {workload: Job}\nstorage: {hostPath: /srv/areal}\n")
    config = make(
        tmp_path,
        "allocation_mode=sglang:d3+fsdp:d1",
        "experiment_name=sums",
        f"stack.kubernetes.values=[{own}]",
    )
    release = Release(config, tmp_path / "files")
    assert release.name == "sums-trial0"
    from areal_launch.processes.commands import run_command

    text = run_command([*release.helm_command, "template", *release.chart_arguments()], "")
    release.manifest = [each for each in yaml.safe_load_all(text) if each]
    assert set(release.services()) == {"buffer", "weight-sync", "trainer", "gateway"}
    kind, name = release.workload()
    assert kind == "Job"
    assert name.startswith("sums-trial0-areal-trainer-")
    servers = next(
        each
        for each in release.manifest
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("sglang")
    )
    assert servers["spec"]["replicas"] == 3
    forward = release.forward("gateway", 23456)
    assert forward == (
        *("kubectl", "-n", "lab", "port-forward"),
        *("service/sums-trial0-areal-gateway", "23456:8080"),
    )
    maps = [each for each in release.manifest if each["kind"] == "ConfigMap"]
    assert str(tmp_path) not in json.dumps(maps), "nothing of this machine goes along"


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: mine
users: [{name: u, user: {token: "0123456789"}}]
clusters: [{name: k, cluster: {server: "https://k.example.com"}}]
contexts:
  - {name: mine, context: {cluster: k, user: u, namespace: own}}
  - {name: theirs, context: {cluster: k, user: u}}
"""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize(
    ("overrides", "context", "namespace"),
    [
        ([], "mine", "lab"),
        (['stack.kubernetes.namespace=""'], "mine", "own"),
        (["stack.kubernetes.context=theirs", 'stack.kubernetes.namespace=""'], "theirs", "default"),
    ],
)
def test_context_when_pinned_then_it_is_said_and_kept_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    context: str,
    namespace: str,
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(file))
    release = Release(make(tmp_path, *overrides), tmp_path / "files")
    said = release.pin_context()
    assert said == f"context {context} (https://k.example.com), namespace {namespace}"
    file.write_text(KUBECONFIG.replace("current-context: mine", "current-context: theirs"))
    where = release._where
    assert release.kubectl_command == ["kubectl", "--context", context, *where]
    assert release.helm_command == [HELM, "--kube-context", context, *where]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_context_when_the_kubeconfig_has_none_of_that_name_then_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(file))
    release = Release(make(tmp_path, "stack.kubernetes.context=other"), tmp_path / "files")
    with pytest.raises(ConfigError, match=r"context 'other'.*get-contexts"):
        release.pin_context()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_context_when_there_is_no_kubeconfig_then_kubectl_finds_its_cluster_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod of the cluster."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    release = Release(make(tmp_path), tmp_path / "files")
    assert release.pin_context() == "the cluster that kubectl finds, namespace lab"
    assert release.kubectl_command == ["kubectl", "-n", "lab"]


def test_release_when_a_token_file_is_given_then_it_does_not_go_into_a_config_map(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    config = make(tmp_path, f"security.token_file={token}")
    with pytest.raises(ConfigError, match=r"auth\.existingSecret"):
        Release(config, tmp_path / "files").chart_arguments()


@pytest.mark.parametrize(
    ("conditions", "word", "cause"),
    [
        ([], "", ""),
        ([{"type": "Running", "status": "True"}], "", ""),
        ([{"type": "Succeeded", "status": "True"}], "finished", ""),
        ([{"type": "Complete", "status": "True"}], "finished", ""),
        (
            [{"type": "Failed", "status": "True", "message": "backoff limit"}],
            "failed",
            "PyTorchJob t-1: backoff limit",
        ),
        ([{"type": "Failed", "status": "False"}], "", ""),
    ],
)
def test_outcome_when_the_job_has_conditions_then_they_decide(
    tmp_path: Path, kubectl: FakeKubectl, conditions: list[Any], word: str, cause: str
) -> None:
    release = Release(
        make(tmp_path, f"stack.kubernetes.kubectl={kubectl.program}"), tmp_path / "files"
    )
    labels = {"app.kubernetes.io/component": "trainer"}
    release.manifest = [{"kind": "PyTorchJob", "metadata": {"name": "t-1", "labels": labels}}]
    kubectl.answer("get PyTorchJob t-1 -o json", {"status": {"conditions": conditions}})
    outcome = release.outcome()
    assert (outcome.word, outcome.cause) == (word, cause)


def healthy(kubectl: FakeKubectl, *, kubeflow: bool = True) -> None:
    """A current cluster that has what a CPU run needs."""
    kubectl.answer("version -o json", {"serverVersion": {"gitVersion": "v1.33.1"}})
    served = {
        "v1": ["Service", "Secret", "ConfigMap", "ServiceAccount", "PersistentVolumeClaim", "Pod"],
        "apps/v1": ["Deployment", "StatefulSet"],
        "batch/v1": ["Job"],
        "policy/v1": ["PodDisruptionBudget"],
        "networking.k8s.io/v1": ["NetworkPolicy"],
        "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
    }
    if kubeflow:
        served["kubeflow.org/v1"] = ["PyTorchJob"]
    kubectl.answer("api-versions", "\n".join(served))
    for version, kinds in served.items():
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        kubectl.answer(f"get --raw {path}", {"resources": [{"kind": kind} for kind in kinds]})
    for kind in ("deployments", "statefulsets", "services", "secrets", "configmaps", "roles"):
        kubectl.answer(f"auth can-i create {kind} --quiet", "")
    node = {"allocatable": {"cpu": "8", "memory": "32Gi"}, "images": []}
    kubectl.answer("get nodes -o json", {"items": [{"status": node}]})
    kubectl.answer("get resourcequota -o json", {"items": []})
    kubectl.answer("get pods -A -o json", {"items": []})
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    storage = {"items": [{"metadata": {"name": "nfs", "annotations": default}}]}
    kubectl.answer("get storageclass -o json", storage)


def diagnose(tmp_path: Path, kubectl: FakeKubectl, *overrides: str) -> dict[str, Any]:
    config = make(tmp_path, f"stack.kubernetes.kubectl={kubectl.program}", *overrides)
    return {each.name: each for each in ClusterDoctor(Release(config, tmp_path / "f")).examine()}


@needs_helm
def test_doctor_when_the_cluster_has_everything_then_nothing_is_missing(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    healthy(kubectl)
    findings = diagnose(tmp_path, kubectl)
    assert [each for each in findings.values() if each.verdict is Verdict.MISSING] == []
    assert findings["storage class"].verdict is Verdict.NOTE, "ReadWriteMany cannot be seen"
    assert findings["quota"].verdict is Verdict.OK


@needs_helm
def test_doctor_when_things_are_missing_then_each_line_says_how_to_get_them(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    healthy(kubectl, kubeflow=False)
    kubectl.answer("get storageclass -o json", {"items": []})
    own = tmp_path / "own.yaml"
    own.write_text("auth: {existingSecret: mine}\nimage: {tag: dev, pullPolicy: Never}\n")
    (kubectl.folder / "auth_can-i_create_roles_--quiet").unlink()
    busy = {
        "spec": {"nodeName": "n", "containers": [{"resources": {"requests": {"cpu": "7900m"}}}]},
        "status": {"phase": "Running"},
    }
    kubectl.answer("get pods -A -o json", {"items": [busy]})
    findings = diagnose(
        tmp_path,
        kubectl,
        f"stack.kubernetes.values=[{own}]",
        "stack.gpus_per_node=8",
        "allocation_mode=sglang:d1+fsdp:d4",
    )
    missing = {name: each for name, each in findings.items() if each.verdict is Verdict.MISSING}
    assert "kubeflow.org/v1 PyTorchJob" in missing["API versions"].found
    assert "trainer.workload=Job" in missing["API versions"].fix
    assert "roles" in missing["permissions"].found
    assert missing["storage class"].found == "no default class"
    assert "areal/control" in missing["images"].found
    assert missing["GPUs"].found == "0 nvidia.com/gpu of 5"
    assert "mine" in missing["secrets"].found
    assert "0.1 free" in missing["quota"].found
    assert findings["network"].verdict is Verdict.NOTE
    assert all(each.fix for each in missing.values())


def test_doctor_when_the_cluster_cannot_be_reached_then_that_is_the_only_line(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    assert list(diagnose(tmp_path, kubectl)) == ["cluster"]


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("2", 2), ("4Gi", 4 * 2**30), ("1.5k", 1500)]
)
def test_quantity_when_read_then_a_number(text: str, number: float) -> None:
    assert quantity(text) == number


def test_quantity_when_it_is_none_then_an_error() -> None:
    with pytest.raises(ArealError, match="4 apples"):
        quantity("4 apples")


def test_doctor_when_this_machine_lacks_a_model_and_gpus_then_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config(
        GRPOConfig, None, ["model.path=nowhere", "stack.gpus_per_node=64", f"run_root={tmp_path}"]
    )
    findings = {each.name: each for each in examine_here(config, can_prepare=False)}
    assert "nowhere" in findings["model"].found
    assert {n for n, f in findings.items() if f.verdict is Verdict.MISSING} == {
        "model",
        "tokenizer",
        "gpus",
    }
    makes_it = {each.name: each for each in examine_here(config, can_prepare=True)}
    assert makes_it["model"].verdict is Verdict.OK
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    full = {each.name: each for each in examine_here(config, can_prepare=True)}
    assert full["disk"].verdict is Verdict.MISSING
