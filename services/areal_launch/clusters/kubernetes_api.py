"""A Kubernetes cluster's API through the `kubernetes` client, kept to one context.

Answers are plain JSON, the form in which helm renders objects; every error is one line of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from areal.errors import ArealError, CannotStart, ConfigError, NotFound

_TIMEOUT_S = 30.0
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesApi:
    """One context of the kubeconfig, or the cluster in whose pod this process runs."""

    def __init__(self, context: str = "", namespace: str = "") -> None:
        """`context`, `namespace`: "" means those that are current now, even if they change later.

        Raises:
            CannotStart: The package kubernetes is not installed, or there is no cluster.
            ConfigError: The kubeconfig has no such context.
        """
        try:
            import kubernetes
        except ImportError as error:
            raise CannotStart(
                f"--on kubernetes: the package kubernetes cannot be imported ({error}); "
                "pip install 'areal-services[launch]'"
            ) from None
        client: Any = kubernetes.client
        config: Any = kubernetes.config  # has no types
        self._errors = client.exceptions.ApiException
        settings: Any = client.Configuration()
        settings.retries = False  # callers ask again, and say so
        file = os.environ.get("KUBECONFIG") or config.KUBE_CONFIG_DEFAULT_LOCATION
        self.context = ""
        try:
            contexts, current = config.list_kube_config_contexts(file)
        except config.ConfigException as error:
            if context:
                raise ConfigError(f"stack.kubernetes.context {context!r}: {error}") from None
            try:
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException:
                raise CannotStart(f"--on kubernetes: no cluster: {file}: {error}") from None
            default = _POD_NAMESPACE.read_text(encoding="utf-8").strip()
        else:
            found = {each["name"]: each["context"] for each in contexts}
            self.context = context or current["name"]
            if self.context not in found:
                raise ConfigError(
                    f"stack.kubernetes.context {context!r}: expected one of {', '.join(found)}"
                )
            with self._one_line():
                config.load_kube_config(
                    file, self.context, client_configuration=settings, persist_config=False
                )
            default = found[self.context].get("namespace") or "default"
        self.namespace = namespace or default
        self.server = str(settings.host)
        self._client = client.ApiClient(settings)
        self.core: Any = client.CoreV1Api(self._client)
        self.custom: Any = client.CustomObjectsApi(self._client)
        self.storage: Any = client.StorageV1Api(self._client)
        self._api = client

    def __str__(self) -> str:
        where = f"context {self.context}" if self.context else "the cluster of this pod"
        return f"{where} ({self.server}), namespace {self.namespace}"

    def get(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Returns the JSON answer to a call of `core`, `storage` or `custom`.

        Raises:
            NotFound: There is no such object.
            ArealError: The cluster refuses, or does not answer.
        """
        return json.loads(self._bytes(call, *arguments, **options))

    def log(self, pod: dict[str, Any], lines: int) -> list[str]:
        """Returns the last lines of a pod's first container; raises as `get` does."""
        text = self._bytes(
            self.core.read_namespaced_pod_log,
            *(pod["metadata"]["name"], self.namespace),
            container=pod["spec"]["containers"][0]["name"],
            tail_lines=lines,
        )
        return text.decode(errors="replace").splitlines()

    def job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Returns a Job, PyTorchJob or TrainJob as it is now, by its rendered form."""
        group, _, version = job["apiVersion"].partition("/")
        plural, name = f"{job['kind'].lower()}s", job["metadata"]["name"]
        read = self.custom.get_namespaced_custom_object
        return dict(self.get(read, group, version, self.namespace, plural, name))

    def version(self) -> str:
        """Returns the server's version, e.g. `v1.33.1`."""
        return str(self.get(self._api.VersionApi(self._client).get_code)["gitVersion"])

    def served(self) -> dict[str, set[str]]:
        listed = {"v1": self.get(self.core.get_api_resources)}
        for group in self.get(self._api.ApisApi(self._client).get_api_versions)["groups"]:
            for each in group["versions"]:
                with contextlib.suppress(ArealError):  # an aggregated API that is down
                    listed[each["groupVersion"]] = self.get(
                        self.custom.get_api_resources, group["name"], each["version"]
                    )
        return {name: {kind["kind"] for kind in v["resources"]} for name, v in listed.items()}

    def may_create(self, group: str, resource: str) -> bool:
        """Whether this user may create such objects in the namespace."""
        wanted = {"namespace": self.namespace, "verb": "create"}
        review = self.get(
            self._api.AuthorizationV1Api(self._client).create_self_subject_access_review,
            {"spec": {"resourceAttributes": {**wanted, "group": group, "resource": resource}}},
        )
        return bool(review["status"]["allowed"])

    def _bytes(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> bytes:
        with self._one_line():
            options |= {"_preload_content": False, "_request_timeout": _TIMEOUT_S}
            return bytes(call(*arguments, **options).data)

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                error.reason = json.loads(error.body or "")["message"]
            kind = NotFound if error.status == 404 else ArealError
            raise kind(f"Kubernetes: {error.reason or error.status}") from None
        except ArealError:
            raise
        except Exception as error:  # urllib3's, the kubeconfig's and its plugins' many classes
            said = " ".join(str(error).split())[:300]
            raise ArealError(f"Kubernetes: {said or type(error).__name__}") from None
