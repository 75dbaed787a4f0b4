"""Kubernetes: one release of the chart, driven through helm and kubectl.

The allocation becomes the lowest values file, so that a values file of the user's wins; recipe and
experiment go in as files. Names are read from the rendered release, never made up a second time.
"""

from __future__ import annotations

import base64
import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from areal.config.clusters import KubernetesConfig, SlurmConfig
from areal.config.experiment import BaseExperimentConfig, parse_allocation
from areal.config.services import EndpointsConfig
from areal.errors import ArealError, ConfigError, NotFound
from areal.security import Security, SecurityConfig
from areal_launch.clusters.base import count_nodes
from areal_launch.clusters.pods import component_of
from areal_launch.processes.commands import run_command

HELM_TIMEOUT_S = 300.0
GRPC_PORT, HTTP_PORT = 50051, 8080
WORKLOADS = ("PyTorchJob", "TrainJob", "Job")
# What the live view asks: component of the chart to key of `endpoints`.
FORWARDED = {
    "buffer": "buffer",
    "weight-sync": "weight_sync",
    "trainer": "trainer",
    "gateway": "gateway",
}


def allocation_values(config: BaseExperimentConfig) -> dict[str, Any]:
    """The chart's values that `allocation_mode` and `stack` stand for."""
    allocation, counts = parse_allocation(config.allocation_mode), count_nodes(config)
    gpus = config.stack.gpus_per_node
    servers: dict[str, Any] = {
        "replicaCount": allocation.inference_replicas,
        "gpus": allocation.inference_gpus if gpus else 0,
    }
    if config.endpoints.inference:
        servers = {"enabled": False}
    return {
        "sglang": servers,
        "rollout": {"replicaCount": config.stack.rollout_workers},
        "trainer": {
            # On CPUs a pod is one rank.
            "replicaCount": counts.trainer_nodes if gpus else allocation.trainer_ranks,
            "gpusPerPod": counts.ranks_per_node if gpus else 0,
        },
    }


def experiment_to_send(config: BaseExperimentConfig) -> str:
    """The experiment file for the chart: what differs from the defaults.

    Images may be of another version than this machine: they refuse keys that they do not know,
    so those that no one has set stay here. So does what only concerns this machine.
    """
    sent = deepcopy(config)
    sent.recipe = ""
    sent.stack.kubernetes, sent.stack.slurm = KubernetesConfig(), SlurmConfig()
    sent.stack.gpus_per_node = sent.stack.ranks_per_node = 0
    chosen, defaults = (
        cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(each), enum_to_str=True))
        for each in (sent, type(config)())
    )
    return yaml.safe_dump(_difference(chosen, defaults), sort_keys=False)


def _difference(chosen: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in chosen.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _difference(value, default)  # noqa: PLW2901
            if value:
                result[key] = value
        elif value != default:
            result[key] = value
    return result


@dataclass(frozen=True)
class Outcome:
    """How the trainer's job stands."""

    word: str = ""
    """finished, failed, or "" while it is neither."""
    cause: str = ""


class Release:
    """One release: installed, looked at, removed."""

    def __init__(self, config: BaseExperimentConfig, folder: Path) -> None:
        """`folder`: for the files that helm is given."""
        self.config = config
        self._settings = config.stack.kubernetes
        self._folder = folder
        self.name = self._settings.release or _release_name(config)
        self._context = self._settings.context
        self._where = ["-n", self._settings.namespace] if self._settings.namespace else []

    @property
    def kubectl_command(self) -> list[str]:
        """`kubectl`, in the release's context and namespace."""
        context = ["--context", self._context] if self._context else []
        return [self._settings.kubectl, *context, *self._where]

    @property
    def helm_command(self) -> list[str]:
        """`helm`, in the release's context and namespace."""
        context = ["--kube-context", self._context] if self._context else []
        return [self._settings.helm, *context, *self._where]

    def pin_context(self) -> str:
        """Keeps to the context that is current now, whatever becomes current later.

        Returns:
            Context, server and namespace in words, for people to see before anything is installed.

        Raises:
            ConfigError: The kubeconfig has no such context.
        """
        try:
            view = json.loads(self.kubectl("config", "view", "--minify", "-o", "json"))
        except NotFound:
            raise
        except ArealError as error:
            if self._context:
                raise ConfigError(
                    f"stack.kubernetes.context {self._context!r}: {error}; "
                    f"`{self._settings.kubectl} config get-contexts` lists them"
                ) from None
            view = {}
        if not view.get("contexts"):  # in a pod of the cluster there need be no kubeconfig
            namespace = self._settings.namespace or "the default one"
            return f"the cluster that kubectl finds, namespace {namespace}"
        self._context = view["contexts"][0]["name"]
        default = view["contexts"][0]["context"].get("namespace") or "default"
        server = view["clusters"][0]["cluster"].get("server", "")
        namespace = self._settings.namespace or default
        return f"context {self._context} ({server}), namespace {namespace}"

    def chart_arguments(self) -> list[str]:
        """Name, chart and values, as `helm install` and `helm template` take them.

        Raises:
            ConfigError: A file is missing, or a secret would end up in the cluster's ConfigMap.
        """
        if self.config.security != SecurityConfig():
            raise ConfigError(
                "security: on Kubernetes secrets come from Secrets; expected the chart's values "
                "auth.existingSecret and tls.existingSecret instead"
            )
        for file in self._settings.values:
            if not Path(file).is_file():
                raise ConfigError(f"stack.kubernetes.values {file!r}: no such file")
        self._folder.mkdir(parents=True, exist_ok=True)
        values = self._folder / "allocation-values.yaml"
        values.write_text(yaml.safe_dump(allocation_values(self.config)))
        experiment = self._folder / "experiment.yaml"
        experiment.write_text(experiment_to_send(self.config))
        files = [str(values), *self._settings.values]
        return [
            *(self.name, self._settings.chart),
            *(part for file in files for part in ("--values", file)),
            *("--set-file", f"recipe={self.config.recipe}"),
            *("--set-file", f"config={experiment}"),
        ]

    def install(self) -> None:
        """Installs or upgrades; does not wait for pods."""
        arguments = self.chart_arguments()
        create = ["--create-namespace"] if self._where else []
        run_command(
            [*self.helm_command, "upgrade", "--install", *create, *arguments],
            "stack.kubernetes.helm names it, `make setup` brings one",
            timeout=HELM_TIMEOUT_S,
        )

    def uninstall(self) -> None:
        """Removes the release; volumes stay."""
        run_command([*self.helm_command, "uninstall", self.name], "", timeout=HELM_TIMEOUT_S)

    def kubectl(self, *arguments: str, timeout: float = 30.0) -> str:
        """Runs kubectl in the namespace."""
        hint = "stack.kubernetes.kubectl names it"
        return run_command([*self.kubectl_command, *arguments], hint, timeout=timeout)

    @cached_property
    def manifest(self) -> list[dict[str, Any]]:
        """The objects of the release."""
        text = run_command([*self.helm_command, "get", "manifest", self.name], "")
        return [each for each in yaml.safe_load_all(text) if each]

    def services(self) -> dict[str, str]:
        """Component to the name of its Service."""
        return {
            component_of(each): each["metadata"]["name"]
            for each in self.manifest
            if each["kind"] == "Service" and component_of(each) in FORWARDED
        }

    def workload(self) -> tuple[str, str]:
        """Kind and name of the trainer's job.

        Raises:
            NotFound: The release has no trainer.
        """
        for each in self.manifest:
            if each["kind"] in WORKLOADS and component_of(each) == "trainer":
                return each["kind"], each["metadata"]["name"]
        raise NotFound(f"release {self.name}: no trainer in it (trainer.enabled)")

    def security(self) -> Security:
        """The token, from the Secret that the pods get it from; in memory only."""
        for secret, key in _secret_keys(self.manifest):
            if key == "token":
                content = json.loads(self.kubectl("get", "secret", secret, "-o", "json"))
                return Security(token=base64.b64decode(content["data"][key]).decode())
        return Security()

    def pods(self) -> list[dict[str, Any]]:
        """All of the release."""
        selector = f"app.kubernetes.io/instance={self.name}"
        found = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))
        pods: list[dict[str, Any]] = found["items"]
        return pods

    def outcome(self) -> Outcome:
        """Whether the trainer's job has ended, and how."""
        return self._outcome(*self.workload())

    def preparation(self) -> Outcome:
        """Whether the Job that makes or brings the model has ended, and how."""
        for each in self.manifest:
            if each["kind"] == "Job" and component_of(each) == "prepare":
                return self._outcome("Job", each["metadata"]["name"])
        return Outcome("finished")

    def _outcome(self, kind: str, name: str) -> Outcome:
        content = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        for condition in content.get("status", {}).get("conditions") or []:
            if condition.get("status") != "True":
                continue
            if condition["type"] in ("Succeeded", "Complete"):
                return Outcome("finished")
            if condition["type"] == "Failed":
                cause = condition.get("message") or condition.get("reason") or "it failed"
                return Outcome("failed", f"{kind} {name}: {cause}")
        return Outcome()

    def last_words(self, component: str = "trainer", lines: int = 2) -> str:
        """The end of its pods' logs; "" when there is none."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        prefix = ["--prefix"] if lines > 1 else []
        try:
            return self.kubectl("logs", "-l", selector, f"--tail={lines}", *prefix).strip()
        except ArealError:
            return ""

    def endpoints(self, ports: dict[str, int]) -> EndpointsConfig:
        """Where the forwarded services are on this machine."""
        endpoints = EndpointsConfig()
        for component, port in ports.items():
            scheme = "http://" if component == "gateway" else ""
            setattr(endpoints, FORWARDED[component], f"{scheme}127.0.0.1:{port}")
        return endpoints

    def forward(self, component: str, port: int) -> tuple[str, ...]:
        """The command that forwards a port of this machine to a service."""
        target = HTTP_PORT if component == "gateway" else GRPC_PORT
        service = self.services()[component]
        return (*self.kubectl_command, "port-forward", f"service/{service}", f"{port}:{target}")


def _secret_keys(content: Any) -> list[tuple[str, str]]:
    """(Secret, key) of every secretKeyRef in some objects."""
    if isinstance(content, list):
        return [found for each in content for found in _secret_keys(each)]
    if not isinstance(content, dict):
        return []
    found = _secret_keys(list(content.values()))
    reference = content.get("secretKeyRef")
    return [(reference["name"], reference["key"]), *found] if reference else found


def _release_name(config: BaseExperimentConfig) -> str:
    """At most 53 characters, which is what helm takes; long names keep both ends and a hash."""
    name = f"{config.experiment_name}-{config.trial_name}"
    if len(name) <= 53:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[:22].rstrip('-')}-{digest}-{name[-22:].lstrip('-')}"
