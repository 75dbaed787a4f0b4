"""What helm is told, and how a cluster's answers are read."""

from __future__ import annotations

import base64
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes_api import SERVED, ApiServer

from areal.config.experiment import GRPOConfig, build_config, load_service_config
from areal.errors import ArealError, CannotStart, ConfigError, NotFound
from areal.recipe import Recipe, find_config_class, load_recipe
from areal.weights import objects
from areal_launch.clusters.kubernetes import (
    Release,
    allocation_values,
    experiment_to_send,
)
from areal_launch.doctor.kubernetes import ClusterDoctor, quantity
from areal_launch.doctor.local import examine_here
from areal_launch.view.output import CheckResult

ROOT = Path(__file__).resolve().parents[3]
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm; make setup brings it")


def make(tmp_path: Path, *overrides: str) -> GRPOConfig:
    config = build_config(
        GRPOConfig,
        None,
        [
            f"stack.kubernetes.chart={ROOT / 'charts' / 'areal'}",
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
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


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
            ["stack.gpus_per_node=1", "stack.inference_command=cpu"],
            {"replicaCount": 2, "gpus": 0},
            {"replicaCount": 1, "gpusPerPod": 1},
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


@pytest.mark.parametrize(
    ("path", "folder", "source"),
    [
        ("hf://Qwen/Qwen3-0.6B@v1", "models/Qwen--Qwen3-0.6B@v1", "hf://Qwen/Qwen3-0.6B@v1"),
        ("s3://lab/models/qwen", "models/lab--models--qwen", "s3://lab/models/qwen"),
        ("./Qwen/Qwen3-0.6B", "./Qwen/Qwen3-0.6B", None),
    ],
)
def test_model_when_it_has_an_address_then_the_cluster_fetches_it(
    tmp_path: Path, path: str, folder: str, source: str | None
) -> None:
    config = make(tmp_path, f"model.path={path}")
    assert yaml.safe_load(experiment_to_send(config))["model"]["path"] == folder
    assert allocation_values(config).get("prepare", {}).get("source") == source


def test_model_when_it_may_be_on_the_hub_or_the_volume_then_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected hf://Qwen/Qwen3-0\.6B or \./Qwen"):
        allocation_values(make(tmp_path, "model.path=Qwen/Qwen3-0.6B"))


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
        "stack": {"rollout_workers": 2, "gpus_per_node": 8},
        "actor": {"optimizer": {"lr": 0.5}},
    }
    file = tmp_path / "sent.yaml"
    file.write_text(yaml.safe_dump(sent))
    again = build_config(GRPOConfig, file, [])
    assert again.gconfig == config.gconfig
    assert again.actor == config.actor


@needs_helm
@pytest.mark.usefixtures("api")
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
    text = release.helm("template", *release.chart_arguments())
    release.manifest = [each for each in yaml.safe_load_all(text) if each]
    assert set(release.services()) == {"buffer", "weight-sync", "trainer", "gateway"}
    servers = next(
        each
        for each in release.manifest
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("sglang")
    )
    assert servers["spec"]["replicas"] == 3
    forward = release.forward("gateway", 23456)
    assert Path(forward[0]).name == "kubectl"
    assert forward[1:] == (
        *("--context", "lab", "-n", "lab", "port-forward"),
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
    assert str(release.api) == f"context {context} (https://k.example.com), namespace {namespace}"
    file.write_text(KUBECONFIG.replace("current-context: mine", "current-context: theirs"))
    where = release._where
    assert release.kubectl_command == ["kubectl", "--context", context, *where]
    assert release.helm_command == ["helm", "--kube-context", context, *where]


def test_context_when_the_kubeconfig_has_none_of_that_name_then_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(file))
    release = Release(make(tmp_path, "stack.kubernetes.context=other"), tmp_path / "files")
    with pytest.raises(ConfigError, match=r"context 'other': expected one of mine, theirs"):
        _ = release.api


def test_context_when_there_is_no_cluster_then_one_line_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(CannotStart, match=r"no cluster: .*none: Invalid kube-config file"):
        _ = Release(make(tmp_path), tmp_path / "files").api


def test_context_when_the_client_is_not_installed_then_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(CannotStart, match=r"pip install 'areal-services\[launch\]'"):
        _ = Release(make(tmp_path), tmp_path / "files").api


def test_helm_when_path_has_none_then_the_one_beside_this_python_is_taken(
    tmp_path: Path, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The virtual environment that holds it need not be active."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    helm = python.with_name("helm")
    helm.write_text(f'#!{shutil.which("sh")}\necho "$@"\n')
    helm.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    release = Release(make(tmp_path), tmp_path / "files")
    assert release.helm("version").split() == ["--kube-context", "lab", "-n", "lab", "version"]
    helm.unlink()
    with pytest.raises(NotFound, match=r"no program 'helm' on PATH or in .*venv/bin"):
        release.helm("version")
    assert api.url in str(release.api)


def test_experiment_when_sent_then_a_key_that_equals_its_default_still_wins_over_the_preset(
    tmp_path: Path,
) -> None:
    config = make(tmp_path, "algorithm=dapo", "actor.eps_clip_higher=null")
    sent = tmp_path / "sent.yaml"
    sent.write_text(experiment_to_send(config))
    there = load_service_config(sent)
    assert there.actor.eps_clip_higher is None
    assert there.actor == config.actor
    assert "reward_norm" not in sent.read_text(), "the preset sets it there too"


@pytest.mark.parametrize("chart", ["charts/areal", "./mine", "/nowhere/areal"])
def test_release_when_the_folder_of_the_chart_is_not_there_then_its_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chart: str
) -> None:
    config = make(tmp_path, f"stack.kubernetes.chart={chart}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"^stack\.kubernetes\.chart '{chart}': not in '{tmp_path}'"
    ):
        Release(config, tmp_path / "files").chart_arguments()


def test_release_when_a_token_is_given_then_it_does_not_go_into_a_config_map(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    config = make(tmp_path, f"security.dir={tmp_path}")
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
    tmp_path: Path, api: ApiServer, conditions: list[Any], word: str, cause: str
) -> None:
    release = Release(make(tmp_path), tmp_path / "files")
    labels = {"app.kubernetes.io/component": "trainer"}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
    release.manifest = [{**job, "metadata": {"name": "t-1", "labels": labels}}]
    api.answers["/apis/kubeflow.org/v1/namespaces/lab/pytorchjobs/t-1"] = {
        "status": {"conditions": conditions}
    }
    outcome = release.outcome()
    assert (outcome.word, outcome.cause) == (word, cause)


def test_release_when_its_secret_is_not_there_then_one_line_says_so(
    tmp_path: Path, api: ApiServer
) -> None:
    release = Release(make(tmp_path), tmp_path / "files")
    reference = {"secretKeyRef": {"name": "mine", "key": "token"}}
    release.manifest = [{"env": [{"valueFrom": reference}]}]
    with pytest.raises(NotFound, match="secrets/mine not found"):
        release.security()
    token = base64.b64encode(b"0123456789abcdef0123").decode()
    api.answers["/api/v1/namespaces/lab/secrets/mine"] = {"data": {"token": token}}
    assert release.security().token == "0123456789abcdef0123"


def test_logs_when_read_then_each_line_names_its_pod(tmp_path: Path, api: ApiServer) -> None:
    pods = [
        {"metadata": {"name": name}, "spec": {"containers": [{"name": "main"}]}}
        for name in ("t-0", "t-1")
    ]
    api.answers["/api/v1/namespaces/lab/pods"] = {"items": pods}
    api.answers["/api/v1/namespaces/lab/pods/t-1/log"] = "step 3\nboom\n"  # t-0 has none yet
    lines = Release(make(tmp_path), tmp_path / "files").last_lines("trainer", 2)
    assert lines == ["[pod/t-1] step 3", "[pod/t-1] boom"]


def healthy(api: ApiServer, *, kubeflow: bool = True) -> None:
    """A current cluster that has what a CPU run needs."""
    api.answers["/version/"] = {"gitVersion": "v1.33.1"}
    api.serve({**SERVED, **({"kubeflow.org/v1": ["PyTorchJob"]} if kubeflow else {})})
    node = {"allocatable": {"cpu": "8", "memory": "32Gi"}, "images": []}
    api.answers["/api/v1/nodes"] = {"items": [{"status": node}]}
    api.answers["/api/v1/namespaces/lab/resourcequotas"] = {"items": []}
    api.answers["/api/v1/namespaces/lab/limitranges"] = {"items": []}
    api.answers["/api/v1/pods"] = {"items": []}
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    storage = {"items": [{"metadata": {"name": "nfs", "annotations": default}}]}
    api.answers["/apis/storage.k8s.io/v1/storageclasses"] = storage


def diagnose(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    config = make(tmp_path, *overrides)
    return {each.name: each for each in ClusterDoctor(Release(config, tmp_path / "f")).examine()}


@needs_helm
def test_doctor_when_the_bucket_cannot_be_written_then_says_so_before_the_run(
    tmp_path: Path, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy(api)
    assert diagnose(tmp_path)["bucket"].verdict is CheckResult.OK
    monkeypatch.setattr(objects, "_RETRIED_FOR_S", 0.1)
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "x",
    }.items():
        monkeypatch.setenv(name, value)
    found = diagnose(tmp_path, "weight_sync.path=s3://models/run")["bucket"]
    assert found.verdict is CheckResult.NOTE
    assert "'s3://models/run': cannot write, list and delete there" in found.found


@needs_helm
def test_doctor_when_the_cluster_has_everything_then_nothing_is_missing(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api)
    findings = diagnose(tmp_path)
    assert [each for each in findings.values() if each.verdict is CheckResult.MISSING] == []
    assert findings["storage class"].verdict is CheckResult.NOTE, "ReadWriteMany cannot be seen"
    assert findings["quota"].verdict is CheckResult.OK


@needs_helm
def test_doctor_when_things_are_missing_then_each_line_says_how_to_get_them(
    tmp_path: Path, api: ApiServer
) -> None:
    healthy(api, kubeflow=False)
    api.answers["/apis/storage.k8s.io/v1/storageclasses"] = {"items": []}
    own = tmp_path / "own.yaml"
    own.write_text("auth: {existingSecret: mine}\nimage: {tag: dev, pullPolicy: Never}\n")
    api.refused.add("roles")
    busy = {
        "spec": {"nodeName": "n", "containers": [{"resources": {"requests": {"cpu": "7900m"}}}]},
        "status": {"phase": "Running"},
    }
    api.answers["/api/v1/pods"] = {"items": [busy]}
    findings = diagnose(
        tmp_path,
        f"stack.kubernetes.values=[{own}]",
        "stack.gpus_per_node=8",
        "allocation_mode=sglang:d1+fsdp:d4",
    )
    missing = {name: each for name, each in findings.items() if each.verdict is CheckResult.MISSING}
    assert "kubeflow.org/v1 PyTorchJob" in missing["API versions"].found
    assert "trainer.workload=Job" in missing["API versions"].fix
    assert "roles" in missing["permissions"].found
    assert missing["storage class"].found == "no default storage class"
    assert "areal/control" in missing["images"].found
    assert missing["GPUs"].found == "nvidia.com/gpu: 5 requested, 0 on the nodes"
    assert "mine" in missing["secrets"].found
    assert "0.1 free" in missing["quota"].found
    assert findings["network"].verdict is CheckResult.NOTE
    assert all(each.fix for each in missing.values())


def test_doctor_when_the_cluster_cannot_be_reached_then_that_is_the_only_line(
    tmp_path: Path, api: ApiServer
) -> None:
    assert list(diagnose(tmp_path)) == ["cluster"]


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
    assert {n for n, f in findings.items() if f.verdict is CheckResult.MISSING} == {
        "model",
        "tokenizer",
        "gpus",
        "engine",
    }
    makes_it = {each.name: each for each in examine_here(config, can_prepare=True)}
    assert makes_it["model"].verdict is CheckResult.OK
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    full = {each.name: each for each in examine_here(config, can_prepare=True)}
    assert full["disk"].verdict is CheckResult.MISSING


def recipe_folder(folder: Path, note: bytes = b"") -> Path:
    """A recipe whose configuration is in a helper module."""
    folder.mkdir()
    (folder / "recipe.py").write_text("from .settings import Config\n\ndef main(argv): pass\n")
    (folder / "settings.py").write_text(
        "from dataclasses import dataclass\n\nfrom areal import GRPOConfig\n\n"
        "@dataclass\nclass Config(GRPOConfig):\n    wall: float = 0.2\n"
    )
    (folder / "note.txt").write_bytes(note)
    return folder


@needs_helm
def test_render_when_the_recipe_is_a_folder_then_pods_load_all_of_it(tmp_path: Path) -> None:
    config = make(tmp_path)
    config.recipe = str(recipe_folder(tmp_path / "mine"))
    own = load_recipe(Recipe.read(Path(config.recipe)).source, config.recipe).Config
    settings = build_config(own, None, ["model.path=models/tiny", "wall=0.5"])
    settings.recipe, settings.stack = config.recipe, config.stack
    objects = [each for each in yaml.safe_load_all(Release(settings, tmp_path).render()) if each]
    (text,) = (each["data"]["recipe.py"] for each in objects if "recipe.py" in each.get("data", {}))
    assert text.encode() == Recipe.read(Path(config.recipe)).source
    module = load_recipe(text.encode(), "/etc/areal/recipe/recipe.py")
    assert find_config_class(module, GRPOConfig)().wall == 0.2


def test_render_when_a_recipe_folder_is_too_large_for_helm_then_one_line(tmp_path: Path) -> None:
    config = make(tmp_path)
    config.recipe = str(recipe_folder(tmp_path / "mine", random.Random(0).randbytes(300_000)))
    with pytest.raises(
        ConfigError, match=r"mine': 4\d+ bytes when packed: expected at most 262144"
    ):
        Release(config, tmp_path).chart_arguments()
