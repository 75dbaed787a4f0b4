"""The part of the Kubernetes API that discovery uses, over real HTTP: slices, watches, pods/status.

Resource versions, bookmarks and 410 behave as the real one's; `mode` makes it misbehave.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web


class FakeKubernetes:
    """One namespace with one Service; a pod per address."""

    def __init__(self, service: str, *, group_version: str = "v1", namespace: str = "rl") -> None:
        self.service, self.namespace, self.group_version = service, namespace, group_version
        self.mode = "good"  # good, 500, 403, silent
        self.pods: dict[str, dict[str, Any]] = {}  # pod name -> conditions by type
        self.selectors: list[str] = []
        self.lists = 0
        self.watches = 0
        self._version = 100
        self._oldest = 0
        self._slice: dict[str, Any] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._cut = 0
        self._endpoints: dict[str, dict[str, Any]] = {}
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        base = f"/apis/discovery.k8s.io/{self.group_version}/namespaces/{{namespace}}"
        app.add_routes(
            [
                web.get(f"{base}/endpointslices", self._slices),
                web.patch("/api/v1/namespaces/{namespace}/pods/{pod}/status", self._patch),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    def write_kubeconfig(self, file: Path) -> Path:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [
                {
                    "name": "fake",
                    "context": {"cluster": "c", "user": "u", "namespace": self.namespace},
                }
            ],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        file.write_text(yaml.safe_dump(content))
        return file

    # ── the world ───────────────────────────────────────────────────────────────────────────

    def add(self, address: str, pod: str = "", *, ready: bool = False) -> None:
        pod = pod or "pod-" + address.replace(".", "-").replace(":", "-")
        self.pods.setdefault(pod, {})
        self._endpoints[address] = {
            "addresses": [address],
            "conditions": {"ready": ready},
            "targetRef": {"kind": "Pod", "name": pod, "namespace": self.namespace},
        }
        self._write()

    def terminate(self, address: str) -> None:
        self._endpoints[address]["conditions"] = {"ready": False, "terminating": True}
        self._write()

    def remove(self, address: str) -> None:
        gone = self._endpoints.pop(address)
        self.pods.pop(gone["targetRef"]["name"], None)
        self._write()

    def delete_slice(self) -> None:
        self._version += 1
        self._emit("DELETED", self._slice)
        self._slice, self._endpoints = {}, {}

    def bookmark(self) -> None:
        self._version += 1
        self._emit("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})

    def compact(self) -> None:
        """Forgets history: a watch from before now is answered with 410."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()
        self.cut()

    def cut(self) -> None:
        """Ends all watches."""
        self._cut += 1
        self._changed.set()

    def _write(self) -> None:
        self._version += 1
        kind = "MODIFIED" if self._slice else "ADDED"
        self._slice = {
            "metadata": {
                "name": f"{self.service}-x1",
                "resourceVersion": str(self._version),
                "labels": {"kubernetes.io/service-name": self.service},
            },
            "addressType": "IPv4",
            "endpoints": [dict(each) for each in self._endpoints.values()],
            "ports": [{"name": "http", "port": 30000, "protocol": "TCP"}, {"name": "m", "port": 9}],
        }
        self._emit(kind, self._slice)

    def _emit(self, kind: str, item: dict[str, Any]) -> None:
        if self.mode == "good":  # an API server that is away tells no one
            self._events.append((self._version, {"type": kind, "object": item}))
        else:
            self._oldest = self._version
        self._changed.set()

    # ── the API ─────────────────────────────────────────────────────────────────────────────

    async def _misbehave(self) -> web.Response | None:
        if self.mode == "silent":
            await asyncio.sleep(60)
        if self.mode in ("500", "403"):
            return web.json_response({"message": f"told to say {self.mode}"}, status=int(self.mode))
        return None

    async def _slices(self, request: web.Request) -> web.StreamResponse:
        if (wrong := await self._misbehave()) is not None:
            return wrong
        self.selectors.append(request.query.get("labelSelector", ""))
        assert request.match_info["namespace"] == self.namespace
        if request.query.get("watch") not in ("1", "true", "True"):
            self.lists += 1
            return web.json_response(
                {
                    "metadata": {"resourceVersion": str(self._version)},
                    "items": [self._slice] if self._slice else [],
                }
            )
        self.watches += 1
        since, cut = int(request.query["resourceVersion"]), self._cut
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self._oldest:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await self._send(response, {"type": "ERROR", "object": status})
            return response
        while self._cut == cut:
            for version, event in list(self._events):
                if version > since:
                    since = version
                    await self._send(response, event)
            self._changed.clear()
            await self._changed.wait()
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(json.dumps(event).encode() + b"\n")

    async def _patch(self, request: web.Request) -> web.Response:
        if (wrong := await self._misbehave()) is not None:
            return wrong
        assert request.content_type == "application/strategic-merge-patch+json"
        conditions = self.pods.get(request.match_info["pod"])
        if conditions is None:
            return web.json_response({"message": "pods not found"}, status=404)
        for condition in (await request.json())["status"]["conditions"]:
            conditions[condition["type"]] = condition
        return web.json_response({"kind": "Pod"})
