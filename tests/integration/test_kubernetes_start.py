"""`areal run --on kubernetes` until the release is up: what it says, and what it gives up.

helm and kubectl are small scripts that answer from files, as a cluster in that state would.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import WaitTimeout
from areal_launch.clusters import pods as pods_module
from areal_launch.commands.kubernetes import Stuck, run_on_kubernetes

IMAGE = "nowhere.example.com/areal/control:0.1.0"
VIEW = {
    "contexts": [{"name": "lab", "context": {}}],
    "clusters": [{"cluster": {"server": "https://lab.example.com"}}],
}


def labelled(kind: str, component: str, **more: object) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    return {"kind": kind, "metadata": {"name": f"r-{component}", "labels": labels}, **more}


class Cluster:
    """What the scripts answer from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        objects = [labelled("Job", "trainer"), labelled("Job", "prepare")]
        self.put("manifest", "\n---\n".join(map(json.dumps, objects)))
        self.put("view", VIEW)
        self.put("trainer", {})
        self.put("prepare", {})
        self.put("said", "")
        said = f'echo "$0 $*" >> {folder}/calls'
        self.helm = self._script(
            "helm", f'{said}; case "$*" in *manifest*) cat {folder}/manifest;; esac'
        )
        answers = {
            "config view": "view",
            "get pods": "pods",
            "get Job r-trainer": "trainer",
            "get Job r-prepare": "prepare",
            "component=prepare": "said",
        }
        cases = " ".join(f'*"{words}"*) cat {folder}/{file};;' for words, file in answers.items())
        self.kubectl = self._script("kubectl", f'case "$*" in {cases} esac')

    def put(self, name: str, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (self._folder / name).write_text(text)

    def calls(self) -> str:
        return (self._folder / "calls").read_text()

    def run(self) -> int:
        recipe = self._folder / "recipe.py"
        recipe.write_text("def main(argv): pass\n")
        overrides = ["model.path=models/tiny", f"run_root={self._folder}/runs"]
        overrides += [f"stack.kubernetes.helm={self.helm}", "stack.kubernetes.timeout_s=0.5"]
        config = build_config(
            GRPOConfig, None, [*overrides, f"stack.kubernetes.kubectl={self.kubectl}"]
        )
        config.recipe = str(recipe)
        return run_on_kubernetes(config, as_json=True, keep=False)

    def _script(self, name: str, body: str) -> str:
        file = self._folder / name
        file.write_text(f"#!{shutil.which('sh')}\n{body}\n")
        file.chmod(0o755)
        return str(file)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    # The log is open until the process ends, and this one has more to do.
    name = "areal_launch.commands.remote.configure_logging"
    monkeypatch.setattr(name, lambda *_, stream: stream.close())
    return Cluster(tmp_path)


def waiting(component: str, reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "not found"}}
    status = {"name": component, "image": IMAGE, "ready": False, "state": state}
    return labelled("Pod", component, status={"phase": "Pending", "containerStatuses": [status]})


def test_run_when_an_image_cannot_be_pulled_then_it_is_said_and_the_run_ends(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_module, "STUCK_S", 0.0)
    cluster.put("pods", {"items": [waiting("buffer", "ErrImagePull")]})
    with pytest.raises(Stuck) as given_up:
        cluster.run()
    said = capsys.readouterr().err
    assert "areal: release gsm8k-grpo-trial0" in said or "areal: release" in said
    for text in (said, str(given_up.value)):
        for word in ("r-buffer", IMAGE, "ErrImagePull", "image.repository"):
            assert word in text
    assert "context lab (https://lab.example.com), namespace default" in said
    assert "Remove it:" in said
    assert "uninstall" not in cluster.calls(), "it stays to be looked at"


def test_run_when_prepare_gives_up_then_so_does_the_run_in_its_words(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.put("pods", {"items": [waiting("buffer", "PodInitializing")]})
    failed = {"type": "Failed", "status": "True", "message": "backoff limit reached"}
    cluster.put("prepare", {"status": {"conditions": [failed]}})
    cluster.put("said", "hf://a/b: no such repository\n")
    assert cluster.run() == 1
    said = capsys.readouterr()
    assert "backoff limit reached | hf://a/b: no such repository" in said.out
    assert "prepare: hf://a/b: no such repository" in said.err


def test_run_when_the_model_is_still_being_fetched_then_pods_may_wait_for_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_launch.commands.kubernetes.LOOK_INTERVAL_S", 0.3)
    preparing = labelled("Pod", "prepare", status={"phase": "Running"})
    cluster.put("pods", {"items": [waiting("buffer", "PodInitializing"), preparing]})
    cluster.put("said", "3 of 9 GiB\n")
    looks = 0
    look = pods_module.StuckWatch.look

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            cluster.put("pods", {"items": [waiting("buffer", "PodInitializing")]})
            cluster.put(
                "prepare", {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
            )
        return look(*arguments)

    monkeypatch.setattr(pods_module.StuckWatch, "look", counted)
    with pytest.raises(WaitTimeout, match="buffer and weight-sync"):
        cluster.run()
    assert looks > 5, "the deadline began when the model was there"
    assert capsys.readouterr().err.count("prepare: 3 of 9 GiB") == 1
