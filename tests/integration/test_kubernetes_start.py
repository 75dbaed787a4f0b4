"""`areal run --on kubernetes` until the release is up: what it says, and what it gives up.

helm is a small script; the API answers from a table, as a cluster in that state would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kubernetes_api import ApiServer

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import WaitTimeout
from areal_launch.clusters import pods as pods_module
from areal_launch.commands.kubernetes import Stuck, run_on_kubernetes

IMAGE = "nowhere.example.com/areal/control:0.1.0"


def labelled(kind: str, component: str, **more: object) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    return {"kind": kind, "metadata": {"name": f"r-{component}", "labels": labels}, **more}


class Cluster:
    """An API, and a helm on PATH that answers from a file and writes down what it is asked."""

    def __init__(self, folder: Path, api: ApiServer) -> None:
        self._folder = folder
        self._api = api
        objects = [
            {"apiVersion": "batch/v1", **labelled("Job", name)} for name in ("trainer", "prepare")
        ]
        (folder / "manifest").write_text("\n---\n".join(map(json.dumps, objects)))
        self.job("trainer", {})
        self.job("prepare", {})
        helm = folder / "helm"
        helm.write_text(
            f'#!/bin/sh\necho "$0 $*" >> {folder}/calls\n'
            f'case "$*" in *manifest*) cat {folder}/manifest;; esac\n'
        )
        helm.chmod(0o755)

    def pods(self, *pods: dict[str, Any]) -> None:
        self._api.answers["/api/v1/namespaces/lab/pods"] = {"items": pods}

    def job(self, component: str, status: dict[str, Any]) -> None:
        path = f"/apis/batch/v1/namespaces/lab/jobs/r-{component}"
        self._api.answers[path] = {"status": status}

    def log(self, component: str, text: str) -> None:
        self._api.answers[f"/api/v1/namespaces/lab/pods/r-{component}/log"] = text

    def calls(self) -> str:
        return (self._folder / "calls").read_text()

    def run(self) -> int:
        recipe = self._folder / "recipe.py"
        recipe.write_text("def main(argv): pass\n")
        overrides = ["model.path=models/tiny", f"run_root={self._folder}/runs"]
        config = build_config(GRPOConfig, None, [*overrides, "rollout.setup_timeout_s=0.5"])
        config.recipe = str(recipe)
        return run_on_kubernetes(config, as_json=True, keep=False)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    # The log is open until the process ends, and this one has more to do.
    name = "areal_launch.commands.remote.configure_logging"
    monkeypatch.setattr(name, lambda *_, stream: stream.close())
    monkeypatch.setattr("areal_launch.commands.kubernetes.PULL_S", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with ApiServer() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig")))
        yield Cluster(tmp_path, api)


def waiting(component: str, reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "not found"}}
    status = {"name": component, "image": IMAGE, "ready": False, "state": state}
    spec = {"containers": [{"name": component}]}
    status = {"phase": "Pending", "containerStatuses": [status]}
    return labelled("Pod", component, spec=spec, status=status)


def test_run_when_an_image_cannot_be_pulled_then_it_is_said_and_the_run_ends(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_module, "STUCK_S", 0.0)
    cluster.pods(waiting("buffer", "ErrImagePull"))
    with pytest.raises(Stuck) as given_up:
        cluster.run()
    said = capsys.readouterr().err
    assert "areal: release gsm8k-grpo-trial0" in said or "areal: release" in said
    for text in (said, str(given_up.value)):
        for word in ("r-buffer", IMAGE, "ErrImagePull", "image.repository"):
            assert word in text
    assert "namespace lab" in said
    assert "To remove it:" in said
    assert "uninstall" not in cluster.calls(), "it stays to be looked at"


def test_run_when_prepare_gives_up_then_so_does_the_run_in_its_words(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.pods(waiting("buffer", "PodInitializing"), waiting("prepare", "Error"))
    failed = {"type": "Failed", "status": "True", "message": "backoff limit reached"}
    cluster.job("prepare", {"conditions": [failed]})
    cluster.log("prepare", "hf://a/b: no such repository\n")
    assert cluster.run() == 1
    said = capsys.readouterr()
    assert "backoff limit reached | hf://a/b: no such repository" in said.out
    assert "prepare: hf://a/b: no such repository" in said.err


def test_run_when_the_model_is_still_being_fetched_then_pods_may_wait_for_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_launch.commands.kubernetes.LOOK_INTERVAL_S", 0.01)
    # Each look takes more than half of the deadline, however busy this machine is.
    clock = SimpleNamespace(monotonic=lambda: 0.3 * looks)
    monkeypatch.setattr("areal_launch.commands.kubernetes.time", clock)
    preparing = waiting("prepare", "") | {"status": {"phase": "Running"}}
    cluster.pods(waiting("buffer", "PodInitializing"), preparing)
    cluster.log("prepare", "3 of 9 GiB\n")
    looks = 0
    look = pods_module.StuckWatch.look

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            cluster.pods(waiting("buffer", "PodInitializing"))
            cluster.job("prepare", {"conditions": [{"type": "Complete", "status": "True"}]})
        return look(*arguments)

    monkeypatch.setattr(pods_module.StuckWatch, "look", counted)
    with pytest.raises(WaitTimeout, match="buffer and weight-sync"):
        cluster.run()
    assert looks > 5, "the deadline began when the model was there"
    assert capsys.readouterr().err.count("prepare: 3 of 9 GiB") == 1


def test_run_when_the_reason_of_an_image_changes_then_it_is_said_once(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's words change with each try, and several components wait for one image."""
    monkeypatch.setattr("areal_launch.commands.kubernetes.LOOK_INTERVAL_S", 0.05)
    looks = 0
    look = pods_module.StuckWatch.look

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        reason = ("ErrImagePull", "ImagePullBackOff")[looks % 2]
        cluster.pods(waiting("buffer", reason), waiting("reward", reason))
        if looks == 6:
            monkeypatch.setattr(pods_module, "STUCK_S", 0.0)
        return look(*arguments)

    monkeypatch.setattr(pods_module.StuckWatch, "look", counted)
    cluster.pods(waiting("buffer", "ErrImagePull"), waiting("reward", "ErrImagePull"))
    with pytest.raises((Stuck, WaitTimeout)):
        cluster.run()
    assert looks > 1
    assert capsys.readouterr().err.count(IMAGE) == 1
