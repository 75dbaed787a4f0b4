"""Renders the chart with the real helm; each combination once."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "areal"
CI = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))
NAMESPACE = "tests"
# What every installation must say, and the files of ci/ say by themselves.
IMAGES = ("--set", "image.repository=registry.example.com/areal")

Json = dict[str, Any]


def helm(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs helm, without a cluster; `variables` of its environment."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("helm", path=path)
    assert found, "helm is not there: `make setup` brings it on Linux x86-64, else install helm 3"
    # It needs 80 MB and ends at once: its garbage collector would be a fifth of its CPU time.
    environment = os.environ | {"KUBECONFIG": os.devnull, "GOGC": "off"} | variables
    return subprocess.run(
        [found, *arguments], capture_output=True, text=True, env=environment, timeout=60
    )


def template(*arguments: str, release: str = "areal") -> subprocess.CompletedProcess[str]:
    """`helm template` of a release."""
    images = () if any("/ci/" in each for each in arguments) else IMAGES
    return helm("template", release, str(CHART), "--namespace", NAMESPACE, *images, *arguments)


@functools.cache
def render(*arguments: str, release: str = "areal") -> tuple[Json, ...]:
    """The objects of a release; the arguments are helm's."""
    done = template(*arguments, release=release)
    assert done.returncode == 0, done.stderr
    return objects_in(done.stdout)


def objects_in(rendered: str) -> tuple[Json, ...]:
    """The objects that helm printed; yaml's own loader would take eight times as long."""
    documents = yaml.load_all(rendered, Loader=yaml.CSafeLoader)
    return tuple(document for document in documents if document)


def render_ci(name: str, *arguments: str) -> tuple[Json, ...]:
    """The objects of a release with a values file of ci/."""
    return render("--values", str(CHART / "ci" / name), *arguments)


def refusal(*arguments: str) -> str:
    """What helm says when it refuses to render."""
    done = template(*arguments)
    assert done.returncode != 0, f"rendered, though {arguments} should be refused"
    return done.stderr


def of_kind(objects: tuple[Json, ...], *kinds: str) -> list[Json]:
    """In the order of rendering."""
    return [each for each in objects if each["kind"] in kinds]


def named(objects: tuple[Json, ...], kind: str, name: str) -> Json:
    """The one object of that kind and name."""
    found = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind}/{name}: {len(found)} found"
    return found[0]


def experiment(objects: tuple[Json, ...]) -> Json:
    """The experiment file that the processes get."""
    text = named(objects, "ConfigMap", "areal-config")["data"]["config.yaml"]
    loaded: Json = yaml.safe_load(text)
    return loaded


@dataclass(frozen=True)
class PodTemplate:
    """A pod that something in the release makes."""

    owner: str
    """Kind/name, for messages."""
    kind: str
    labels: dict[str, str]
    spec: Json

    @property
    def component(self) -> str:
        """Its component's name."""
        return self.labels["app.kubernetes.io/component"]

    def containers(self) -> list[Json]:
        """Init containers, too."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def pods(objects: tuple[Json, ...]) -> Iterator[PodTemplate]:
    """Every pod template of a release, whatever it is in."""
    for each in objects:
        kind, spec = each["kind"], each.get("spec", {})
        owner = f"{kind}/{each['metadata']['name']}"
        if kind == "Pod":
            yield PodTemplate(owner, kind, each["metadata"]["labels"], spec)
            continue
        if kind in ("Deployment", "StatefulSet", "Job"):
            templates = [("", spec["template"])]
        elif kind == "PyTorchJob":
            replicas = spec["pytorchReplicaSpecs"].items()
            templates = [(f"/{name}", replica["template"]) for name, replica in replicas]
        elif kind == "TrainingRuntime":
            jobs = spec["template"]["spec"]["replicatedJobs"]
            templates = [(f"/{job['name']}", job["template"]["spec"]["template"]) for job in jobs]
        else:
            continue
        for suffix, template_ in templates:
            yield PodTemplate(
                owner + suffix, kind, template_["metadata"]["labels"], template_["spec"]
            )


@functools.cache
def crd_schemas() -> dict[tuple[str, str], Json]:
    """(apiVersion, kind) to the schema of its objects; unknown fields are refused."""
    schemas = {}
    for file in sorted((Path(__file__).parent / "crds").glob("*.json")):
        crd = json.loads(file.read_text())
        schemas[crd["apiVersion"], crd["kind"]] = _closed(crd["schema"])
    return schemas


def _closed(schema: Any) -> Any:
    """The API server drops fields it does not know; here they are mistakes."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    known = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if known and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
