"""The three calls of the Kubernetes API that discovery needs, each with a deadline.

The role they take: get, list, watch `endpointslices` (discovery.k8s.io) and patch `pods/status`.
EndpointSlices are read as plain JSON: v1 where the cluster has it, v1beta1 before 1.21.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp

from areal.errors import ConfigError

_GROUP = "discovery.k8s.io"
VERSIONS = ("v1", "v1beta1")
_SERVICE_LABEL = "kubernetes.io/service-name"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CALL_WITHIN_S = 10.0
# The server ends a watch after so long, and the client soon after if the server could not say so.
_WATCH_S = 240
_WATCH_MARGIN_S = 20.0

Json = dict[str, Any]


class ApiError(Exception):
    """The API server refused, or could not be asked (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """One Service's EndpointSlices, and the status of its pods."""

    def __init__(self, namespace: str, service: str) -> None:
        """Credentials are read at the first call: in-cluster, or those of KUBECONFIG.

        Args:
            namespace: Empty: this pod's own, or the one of KUBECONFIG's context.
            service: The Service whose slices to list.

        Raises:
            ConfigError: The client's package is not installed.
        """
        self.service = service
        self._namespace = namespace
        self._version = VERSIONS[0]
        self._client: Any = None
        try:
            # Half a second of CPU: only where it is used, and before the loop serves. The client
            # imports each group of the API when it is first named; the core's costs a second more.
            self._kubernetes = importlib.import_module("kubernetes.aio")
            self._custom_api = self._kubernetes.client.CustomObjectsApi
        except ImportError:
            raise ConfigError(
                f"endpoints.inference: kubernetes://{namespace}/{service} needs the package "
                "kubernetes: pip install 'areal-services[weight-sync]'"
            ) from None

    async def slices(self) -> tuple[list[Json], str]:
        """Returns all slices of the Service, and the resource version to watch from.

        Raises:
            ApiError: The server refused; the message is its own.
        """
        for version in VERSIONS:
            try:
                async with _deadline():
                    response = await self._slices(version)
                    body = await response.json(content_type=None)
            except ApiError as error:
                if error.status != 404 or version == VERSIONS[-1]:
                    raise
                continue
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _unreachable(error) from None
            self._version = version
            try:
                return list(body.get("items") or []), str(body["metadata"]["resourceVersion"])
            except (AttributeError, KeyError, TypeError):
                raise ApiError(0, f"not a list: {str(body)[:200]}") from None
        raise AssertionError("unreachable: the last version raises")

    async def watch(self, resource_version: str) -> AsyncGenerator[Json, None]:
        """Events from there on: `{"type": …, "object": …}`; ends when the server ends it.

        Raises:
            ApiError: 410: list again. Others: with what the server said.
        """
        try:
            async with asyncio.timeout(_WATCH_S + _WATCH_MARGIN_S):
                response = await self._slices(
                    self._version,
                    resource_version=resource_version,
                    watch=True,
                    allow_watch_bookmarks=True,
                    timeout_seconds=_WATCH_S,
                )
                try:
                    while line := await response.content.readline():
                        yield _event(line)
                finally:
                    response.close()
        except TimeoutError:
            return  # a connection that died silently: the caller watches again
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _unreachable(error) from None

    async def patch_condition(self, pod: str, condition: Json) -> None:
        """Sets one condition in a pod's status.

        Raises:
            ApiError: 404: the pod has gone.
        """
        try:
            async with _deadline():
                client = await self._connected()
                request = await client.param_serialize(
                    "PATCH",
                    "/api/v1/namespaces/{namespace}/pods/{name}/status",
                    path_params={"namespace": self._namespace, "name": pod},
                    header_params={
                        "Accept": "application/json",
                        "Content-Type": "application/strategic-merge-patch+json",
                    },
                    body={"status": {"conditions": [condition]}},
                    auth_settings=["BearerToken"],
                )
                answer = await client.call_api(*request, _preload_content=False)
                await _check(answer.response)
                answer.response.release()
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error) from None

    async def close(self) -> None:
        """Closes the connections to the API server."""
        if self._client is not None:
            await self._client.close()

    async def _slices(self, version: str, **options: Any) -> aiohttp.ClientResponse:
        custom = self._custom_api(await self._connected())
        # Plain JSON by group and version: the typed client knows v1 only.
        response = await custom.list_namespaced_custom_object_without_preload_content(
            _GROUP,
            version,
            self._namespace,
            "endpointslices",
            label_selector=f"{_SERVICE_LABEL}={self.service}",
            **options,
        )
        await _check(response)
        return cast("aiohttp.ClientResponse", response)

    async def _connected(self) -> Any:
        """The client, made at the first call."""
        if self._client is None:
            kubernetes = self._kubernetes
            configuration = kubernetes.client.Configuration()
            own = "" if "KUBECONFIG" in os.environ else _own_namespace()
            try:
                if not own:
                    loader = await kubernetes.config.load_kube_config(
                        client_configuration=configuration, persist_config=False
                    )
                    context = loader.current_context["context"]
                    own = context.get("namespace") or "default"
                else:
                    kubernetes.config.load_incluster_config(client_configuration=configuration)
            except (kubernetes.config.ConfigException, OSError) as error:
                raise ApiError(0, f"no credentials: {error}") from None
            self._namespace = self._namespace or own
            self._client = kubernetes.client.ApiClient(configuration)
        return self._client


def _own_namespace() -> str:
    """Returns the namespace of this process's pod; empty outside of a cluster."""
    try:
        return _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@contextlib.asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_CALL_WITHIN_S):
            yield
    except TimeoutError:
        raise ApiError(0, f"the API server did not answer within {_CALL_WITHIN_S:.0f} s") from None


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    text = await response.text()
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(text.split())
    raise ApiError(response.status, f"HTTP {response.status}: {message[:300]}")


def _event(line: bytes) -> Json:
    event: Json = json.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise ValueError(f"no watch event: {line[:200]!r}")
    if event.get("type") == "ERROR":
        status = event["object"]
        raise ApiError(int(status.get("code") or 0), str(status.get("message", status))[:300])
    return event


def _unreachable(error: Exception) -> ApiError:
    return ApiError(0, str(error)[:300] or type(error).__name__)
