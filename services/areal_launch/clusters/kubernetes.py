"""Kubernetes: one release of the chart, installed by helm, looked at through the cluster's API.

The allocation becomes the lowest values file, so that a values file of the user's wins; recipe and
experiment go in as files. Names are read from the rendered release, never made up a second time.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from areal.config.allocation import parse_allocation
from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.config.model_origin import find_model
from areal.config.presets import preset
from areal.config.services import EndpointsConfig, KubernetesConfig, SlurmConfig
from areal.errors import ArealError, ConfigError, NotFound
from areal.recipe import Recipe
from areal.security import Security, SecurityConfig
from areal_launch.clusters.base import count_nodes, refuse_sharing, servers_on_gpus
from areal_launch.clusters.kubernetes_api import KubernetesApi
from areal_launch.clusters.pods import component_of
from areal_launch.processes.commands import find_program, run_command

HELM_TIMEOUT_S = 300.0
MAX_RECIPE_BYTES = 256 * 1024
"""Largest size of a packed folder. Helm keeps values and objects (the recipe twice) in a Secret of
1 MiB."""
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
    """Returns the chart's values for `allocation_mode`, `stack` and `model.path`.

    Raises:
        ConfigError: `allocation_mode` has `|`, or cannot be spread over pods.
    """
    refuse_sharing(config, "Kubernetes")
    allocation, counts = parse_allocation(config.allocation_mode), count_nodes(config)
    gpus = config.stack.gpus_per_node
    servers: dict[str, Any] = {
        "replicaCount": allocation.inference_replicas,
        "gpus": allocation.inference_gpus if gpus and servers_on_gpus(config) else 0,
    }
    if config.endpoints.inference:
        servers = {"enabled": False}
    _, source = _model(config)
    return {
        **({"prepare": {"source": source}} if source else {}),
        "sglang": servers,
        "rollout": {"replicaCount": config.stack.rollout_workers},
        "trainer": {
            # On CPUs a pod is one rank.
            "replicaCount": counts.trainer_nodes if gpus else allocation.trainer_ranks,
            "gpusPerPod": counts.ranks_per_node if gpus else 0,
        },
    }


def _model(config: BaseExperimentConfig) -> tuple[str, str]:
    """`model.path` on the cluster's volume, and the address that it is fetched from, or "".

    A plain `org/name` is refused, because it could be a folder there, unless a folder `org` exists
    here, too.
    """
    folder, source = find_model(config.model.path, made=True)
    return str(folder) if source else config.model.path, source


def experiment_to_send(config: BaseExperimentConfig) -> str:
    """Returns the experiment file for the chart: the values that differ from the defaults.

    Images may be of another version than this machine: they refuse keys that they do not know,
    so those that no one has set stay here. So does what only concerns this machine.
    """
    sent = deepcopy(config)
    sent.recipe = ""
    sent.model.path, _ = _model(config)
    sent.stack.kubernetes, sent.stack.slurm = KubernetesConfig(), SlurmConfig()
    # With stack.gpus_per_node a trainer refuses a pod whose torch finds no GPU.
    sent.stack.ranks_per_node = 0
    chosen, defaults = (
        cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(each), enum_to_str=True))
        for each in (sent, type(config)())
    )
    if isinstance(sent, GRPOConfig):  # there as here, the algorithm's preset comes first
        for section, keys in preset(sent.algorithm, sent.gconfig.max_new_tokens).items():
            defaults[section] |= keys
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
    """How the trainer's job ended, if it has."""

    word: str = ""
    """"finished", "failed", or "" if it is neither."""
    cause: str = ""


class Release:
    """One release: installed, looked at, removed."""

    def __init__(self, config: BaseExperimentConfig, folder: Path) -> None:
        """`folder` is for the files that are passed to helm."""
        self.config = config
        self._settings = config.stack.kubernetes
        self._folder = folder
        self.name = _release_name(config)
        self._where = ["-n", self._settings.namespace] if self._settings.namespace else []

    @cached_property
    def api(self) -> KubernetesApi:
        """The cluster of the context that is current at the first use."""
        return KubernetesApi(self._settings.context, self._settings.namespace)

    @property
    def kubectl_command(self) -> list[str]:
        context = ["--context", self.api.context] if self.api.context else []
        return ["kubectl", *context, *self._where]

    @property
    def helm_command(self) -> list[str]:
        context = ["--kube-context", self.api.context] if self.api.context else []
        return ["helm", *context, *self._where]

    def chart_arguments(self) -> list[str]:
        """Returns name, chart and values, as `helm install` and `helm template` take them.

        Raises:
            ConfigError: The chart or a file is missing, a secret would end up in the cluster's
                ConfigMap, or the recipe is a folder that is too large for helm.
        """
        if self.config.security != SecurityConfig():
            raise ConfigError(
                "security: expected no keys of this section on Kubernetes; set the chart's values "
                "auth.existingSecret and tls.existingSecret, which name Secrets, instead"
            )
        chart = self._settings.chart
        folder = chart == KubernetesConfig.chart or chart.startswith((".", "/"))
        if folder and not Path(chart).exists():
            raise ConfigError(
                f"stack.kubernetes.chart {chart!r}: not in {str(Path.cwd())!r}: expected the "
                "folder charts/areal of this project's repository"
            )
        for file in self._settings.values:
            if not Path(file).is_file():
                raise ConfigError(f"stack.kubernetes.values {file!r}: no such file")
        self._folder.mkdir(parents=True, exist_ok=True)
        values = self._folder / "allocation-values.yaml"
        values.write_text(yaml.safe_dump(allocation_values(self.config)), "utf-8")
        experiment = self._folder / "experiment.yaml"
        experiment.write_text(experiment_to_send(self.config), "utf-8")
        files = [str(values), *self._settings.values]
        return [
            *(self.name, chart),
            *(part for file in files for part in ("--values", file)),
            *("--set-file", f"recipe={self._recipe_file()}"),
            *("--set-file", f"config={experiment}"),
        ]

    def _recipe_file(self) -> Path:
        """The recipe; a folder is packed into one file."""
        recipe = Path(self.config.recipe)
        if not recipe.is_dir():
            return recipe
        source = Recipe.read(recipe).source
        if len(source) > MAX_RECIPE_BYTES:
            raise ConfigError(
                f"recipe {str(recipe)!r}: {len(source)} bytes when packed: expected at most "
                f"{MAX_RECIPE_BYTES} on Kubernetes, where helm keeps it with the release"
            )
        packed = self._folder / "recipe.py"
        packed.write_bytes(source)
        return packed

    def helm(self, *arguments: str) -> str:
        """Returns helm's output; raises ArealError with its message, NotFound without helm."""
        hint = "`make setup` installs one"
        return run_command([*self.helm_command, *arguments], hint, timeout=HELM_TIMEOUT_S)

    def render(self) -> str:
        """Returns the objects that `install` would make in an empty namespace; asks no cluster."""
        argv = ["helm", "template", *self._where, *self.chart_arguments()]
        return run_command(argv, "`make setup` installs one", timeout=HELM_TIMEOUT_S)

    def install(self) -> None:
        """Installs or upgrades; does not wait for pods."""
        create = ["--create-namespace"] if self._where else []
        self.helm("upgrade", "--install", *create, *self.chart_arguments())

    def uninstall(self) -> None:
        """Removes the release; volumes stay."""
        self.helm("uninstall", self.name)

    @cached_property
    def manifest(self) -> list[dict[str, Any]]:
        text = self.helm("get", "manifest", self.name)
        return [each for each in yaml.safe_load_all(text) if each]

    def services(self) -> dict[str, str]:
        """Returns the Service name of each component."""
        return {
            component_of(each): each["metadata"]["name"]
            for each in self.manifest
            if each["kind"] == "Service" and component_of(each) in FORWARDED
        }

    def security(self) -> Security:
        """Returns the token from the Secret that the pods use; it is kept in memory only."""
        for secret, key in _secret_keys(self.manifest):
            if key == "token":
                read = self.api.core.read_namespaced_secret
                content = self.api.get(read, secret, self.api.namespace)
                return Security(token=base64.b64decode(content["data"][key]).decode())
        return Security()

    def pods(self, component: str = "") -> list[dict[str, Any]]:
        """Returns the pods of the release, or of one of its components."""
        selector = f"app.kubernetes.io/instance={self.name}"
        selector += f",app.kubernetes.io/component={component}" if component else ""
        listing = self.api.core.list_namespaced_pod
        found = self.api.get(listing, self.api.namespace, label_selector=selector)
        return list(found["items"])

    def outcome(self) -> Outcome:
        """Returns whether the trainer's job has ended, and how.

        Raises:
            NotFound: The release has no trainer.
        """
        outcome = self._outcome("trainer", WORKLOADS)
        if outcome is None:
            raise NotFound(f"release {self.name}: it has no trainer; set trainer.enabled=true")
        return outcome

    def preparation(self) -> Outcome:
        """Returns whether the Job that creates or fetches the model has ended, and how."""
        return self._outcome("prepare", ("Job",)) or Outcome("finished")

    def _outcome(self, component: str, kinds: tuple[str, ...]) -> Outcome | None:
        """Returns how the job ended; None: the release has no such job."""
        jobs = [j for j in self.manifest if j["kind"] in kinds and component_of(j) == component]
        if not jobs:
            return None
        for condition in self.api.job(jobs[0]).get("status", {}).get("conditions") or []:
            if condition.get("status") != "True":
                continue
            if condition["type"] in ("Succeeded", "Complete"):
                return Outcome("finished")
            if condition["type"] == "Failed":
                cause = condition.get("message") or condition.get("reason") or "it failed"
                return Outcome(
                    "failed", f"{jobs[0]['kind']} {jobs[0]['metadata']['name']}: {cause}"
                )
        return Outcome()

    def last_lines(self, component: str, lines: int) -> list[str]:
        """Returns the end of its pods' logs, as `[pod/NAME] line`, if there are any."""
        found = []
        with contextlib.suppress(ArealError):
            for pod in self.pods(component):
                with contextlib.suppress(ArealError):  # a container that has not started
                    prefix = f"[pod/{pod['metadata']['name']}] "
                    found += [prefix + line for line in self.api.log(pod, lines)]
        return found

    def endpoints(self, ports: dict[str, int]) -> EndpointsConfig:
        """Returns the forwarded services' addresses on this machine."""
        endpoints = EndpointsConfig()
        for component, port in ports.items():
            scheme = "http://" if component == "gateway" else ""
            setattr(endpoints, FORWARDED[component], f"{scheme}127.0.0.1:{port}")
        return endpoints

    def forward(self, component: str, port: int) -> tuple[str, ...]:
        """Returns the command that forwards a port of this machine to a service.

        It uses kubectl, because the Python client forwards to a socket that no other program can
        use.
        """
        target = HTTP_PORT if component == "gateway" else GRPC_PORT
        service = self.services()[component]
        program, *where = self.kubectl_command
        found = find_program(program, "`make setup` installs one")
        return (found, *where, "port-forward", f"service/{service}", f"{port}:{target}")


def _secret_keys(content: Any) -> list[tuple[str, str]]:
    """Returns (Secret, key) of every secretKeyRef in some objects."""
    if isinstance(content, list):
        return [found for each in content for found in _secret_keys(each)]
    if not isinstance(content, dict):
        return []
    found = _secret_keys(list(content.values()))
    reference = content.get("secretKeyRef")
    return [(reference["name"], reference["key"]), *found] if reference else found


def _release_name(config: BaseExperimentConfig) -> str:
    """Returns a name of at most 53 characters, as helm requires; long ones end in a hash."""
    name = f"{config.experiment_name}-{config.trial_name}"
    if len(name) <= 53:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[:22].rstrip('-')}-{digest}-{name[-22:].lstrip('-')}"
