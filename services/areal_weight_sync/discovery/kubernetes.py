"""Servers from a Service's EndpointSlices, and the readiness gate of their pods.

    list ──> listing ──> watch ── ADDED, MODIFIED, DELETED ──> listing
      ^                    │ ended by the server: watch on from the last version seen (bookmarks)
      └── 410 Gone, error ─┘ after a pause with jitter; the last listing stands meanwhile

| loop      | consumes             | waits for            | unblocked by                      |
|-----------|----------------------|----------------------|-----------------------------------|
| watch     | the API's events     | a change of a slice  | the API server, its end of watch  |
| accompany | states of servers    | a change of a server | a member; a pod that newly appears|

Addresses that are not ready count too: a pod is not ready before weight-sync has given it the
current weights and set its condition `areal.io/weights-current`. An endpoint that is `terminating`
(its pod has a deletionTimestamp) is not listed any more, which drains it; clusters before 1.22
take such endpoints out of the slice, which comes to the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.config.server_sources import ServerSource
from areal.weights.servers import ServerState
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.discovery.base import Found, Listing, Source
from areal_weight_sync.discovery.kubernetes_api import ApiError, Json
from areal_weight_sync.index import Feed
from areal_weight_sync.server_state import ServerRecord

CONDITION = "areal.io/weights-current"
_PATCHES_AT_ONCE = 16


class Api(Protocol):
    """The part of the Kubernetes API used here; see `kubernetes_api.KubernetesApi`."""

    async def slices(self) -> tuple[list[Json], str]:
        """Returns all slices, and the version to watch from."""

    def watch(self, resource_version: str) -> AsyncGenerator[Json, None]:
        """Events from there on."""

    async def patch_condition(self, pod: str, condition: Json) -> None:
        """Sets one condition of a pod."""

    async def close(self) -> None:
        """Closes the connections to the API server."""


class KubernetesSource(Source):
    """Finds servers by EndpointSlices; see the module's picture."""

    def __init__(self, source: ServerSource, api: Api) -> None:
        super().__init__(source.entry)
        self._port = source.port
        self._api = api
        self._slices: dict[str, Json] = {}
        self._found: dict[str, Found] = {}
        self._feed: Feed | None = None
        self._said: dict[str, str] = {}  # pod to the status of its condition
        self._log = get_logger(__name__).bind(source=source.entry)

    async def watch(self) -> AsyncGenerator[Listing, None]:
        backoff = Backoff(0.2, 15.0)
        while True:
            try:
                items, version = await self._api.slices()
                self._slices = {_name(item): item for item in items}
                yield self._list()
                if not backoff.fresh:
                    self._log.info("endpoints_known_again")
                while True:
                    async for event in self._api.watch(version):
                        item, kind = event["object"], event.get("type")
                        version = str(item.get("metadata", {}).get("resourceVersion") or version)
                        if kind == "BOOKMARK":
                            backoff.reset()
                            continue
                        if kind == "DELETED":
                            self._slices.pop(_name(item), None)
                        else:
                            self._slices[_name(item)] = item
                        yield self._list()
                        backoff.reset()
                    # An API server that ends each watch at once must not be asked in a busy loop.
                    await asyncio.sleep(0.2)
            except ApiError as error:
                if backoff.fresh and error.status != 410:
                    self._log.warning("endpoints_unknown", error=str(error))
                await backoff.sleep()

    async def accompany(self, coordinator: Coordinator) -> None:
        """Keeps the readiness condition of every pod true to its server's state."""
        self._feed = coordinator.open_feed()
        backoff = Backoff(0.2, 15.0)
        pending: dict[str, None] = {}
        while True:
            taken = await self._feed.take(backoff.next() if pending else None)
            pending.update(dict.fromkeys(taken))
            for batch in _batches(list(pending)):
                done = await asyncio.gather(
                    *(self._say(server_id, coordinator) for server_id in batch)
                )
                for server_id, said in zip(batch, done, strict=True):
                    if said:
                        del pending[server_id]
            if not pending:
                backoff.reset()

    async def close(self) -> None:
        await self._api.close()

    def _list(self) -> Listing:
        before, self._found = self._found, addresses(self._slices.values(), self._port, self._log)
        for server_id, found in self._found.items():
            if self._feed is not None and before.get(server_id) != found:
                self._feed.put(server_id)  # a new pod may have an old one's address
        pods = {found.pod for found in self._found.values()}
        self._said = {pod: status for pod, status in self._said.items() if pod in pods}
        return self._found

    async def _say(self, server_id: str, coordinator: Coordinator) -> bool:
        """Patches one pod if needed; False: try again."""
        found, record = self._found.get(server_id), coordinator.record(server_id)
        target = coordinator.target
        if found is None or not found.pod or record is None or target is None:
            return True
        wanted = _verdict(record, target.version)
        if wanted is None or self._said.get(found.pod) == wanted:
            return True
        condition = {
            "type": CONDITION,
            "status": wanted,
            "reason": record.state.value.capitalize(),
            "message": record.cause[:500] or f"{record.state} at version {record.version}",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        try:
            await self._api.patch_condition(found.pod, condition)
        except ApiError as error:
            if error.status != 404:  # 404: it has gone, and will be out of the slices soon
                self._log.warning("condition_not_patched", pod=found.pod, error=str(error))
                return False
        self._said[found.pod] = wanted
        return True


def _verdict(record: ServerRecord, version: int) -> str | None:
    """Returns the condition's new value; None: unchanged (an update, or a new coordinator)."""
    if record.state is ServerState.SERVING:
        return "True" if record.version == version else None
    if record.state in (ServerState.QUARANTINED, ServerState.DRAINING):
        return "False"
    return "False" if record.state is ServerState.JOINING and record.cause else None


def addresses(slices: Iterable[Json], port: int, log: Any) -> dict[str, Found]:
    """Returns servers of EndpointSlices (v1 or v1beta1): every address that is not terminating.

    A pod of a Service with both families is in a slice of each, and is one server: the IPv4 one,
    which every server listens on.

    Args:
        slices: EndpointSlices as JSON.
        port: 0: the slice's port named `http`, or its only one.
        log: Told of a slice without such a port.
    """
    found: dict[str, Found] = {}
    seen: set[str] = set()
    for item in sorted(slices, key=lambda each: (each.get("addressType") == "IPv6", _name(each))):
        number = port or _port_of(item)
        if not item.get("endpoints"):
            continue
        if number == 0:
            log.warning(
                "endpoints_without_port",
                slice=_name(item),
                expected="one port, a port named http, or :PORT in endpoints.inference",
            )
            continue
        for endpoint in item.get("endpoints") or []:
            target = endpoint.get("targetRef") or {}
            uid = str(target.get("uid", ""))
            if (endpoint.get("conditions") or {}).get("terminating") or uid in seen:
                continue
            seen |= {uid} - {""}
            pod = str(target.get("name", "")) if target.get("kind") == "Pod" else ""
            for address in (endpoint.get("addresses") or [])[:1]:  # all of them are the same pod
                host = f"[{address}]" if item.get("addressType") == "IPv6" else address
                server_id = f"{host}:{number}"
                found[server_id] = Found(f"http://{server_id}", pod)
    return found


def _port_of(item: Mapping[str, Any]) -> int:
    ports = [each for each in item.get("ports") or [] if each.get("port")]
    named = [each for each in ports if each.get("name") == "http"]
    chosen = named or ports
    return int(chosen[0]["port"]) if len(chosen) == 1 else 0


def _name(item: Mapping[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("name", ""))


def _batches(ids: list[str]) -> list[list[str]]:
    return [ids[at : at + _PATCHES_AT_ONCE] for at in range(0, len(ids), _PATCHES_AT_ONCE)]
