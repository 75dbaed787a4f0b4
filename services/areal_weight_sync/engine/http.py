"""An inference server over HTTP: SGLang's endpoints, with a deadline and a clear cause each.

What real SGLang needs to be told or spared:
- in_place keeps the KV cache, so the load must say `flush_cache: false`: with the default it
  answers 400 although weights and version have changed.
- /health generates a token and takes a second: /model_info and /v1/loads are the probes.
- only /v1/loads is answered by the scheduler; /model_info by the HTTP process before it.
- the weight_version of /server_info's top level is the one at the start: never read here.
- it has no /stage_weights: a sidecar beside it pulls versions into a folder that it can load.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from areal.chassis.logging import get_logger
from areal.clients.http_token import or_else
from areal.config.transports import in_object_store, is_fetched
from areal.errors import InvalidInput
from areal.weights.broadcast import Seat
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import patience_s
from areal_weight_sync.engine.base import CannotPullError, EngineError, Fault, Fingerprint
from areal_weight_sync.engine.broadcast_group import BroadcastGroup
from areal_weight_sync.engine.givers import Givers
from areal_weight_sync.engine.routes import Routes, Tried

_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9._:-]{0,252}")
_MAX_BODY_BYTES = 16 * 1024 * 1024
_MEMORY = {"tags": ["kv_cache", "weights"]}
_GIVERS_TRIED = 3  # then the store


def normalize_url(url: str) -> tuple[str, str]:
    """Returns (server_id, url) in one spelling; raises InvalidInput."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = parts.hostname or ""
        host.encode("idna")  # what looking it up begins with: no empty and no long label
    except ValueError as error:
        raise InvalidInput(f"url {url[:300]!r}: {error}") from None
    if not _HOST.fullmatch(host):
        raise InvalidInput(f"url {url[:300]!r}: expected http://host:port")
    if parts.scheme not in ("http", "https") or parts.username:
        raise InvalidInput(f"url {url[:300]!r}: expected http://host:port")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise InvalidInput(f"url {url[:300]!r}: expected http://host:port, without a path")
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}", f"{parts.scheme}://{host}:{port}"


def open_session(
    headers: Mapping[str, str], previous: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Opens a session for all servers: no pool limit, deadlines per call.

    Args:
        headers: Sent with every request: the bearer token (SGLang's `--api-key`).
        previous: Sent instead to a server that refuses them, while the token is rotated.
    """
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_end.append(_connected)
    return aiohttp.ClientSession(
        trace_configs=[tracing],
        # Below the 5 s after which uvicorn closes idle connections: never reuse a dead one.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Accept-Encoding": "identity", **headers},
        middlewares=or_else(previous or {}),
    )


def listed_adapters(body: Mapping[str, Any]) -> list[str]:
    """Returns the adapters' names in an answer of /v1/models; raises EngineError."""
    try:
        return [str(card["id"]) for card in body["data"] if card.get("parent")]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(Fault.GARBAGE, f"/v1/models: {error!r:.200}") from None


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, *__: object) -> None:
    engine = context.trace_request_ctx
    if isinstance(engine, HttpEngine):
        engine.connections += 1


class HttpEngine:
    """Speaks SGLang's HTTP protocol; see `areal_weight_sync.engine.base.Engine`."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        control_timeout: float = 10.0,
        routes: Routes | None = None,
        givers: Givers | None = None,
    ) -> None:
        self._url = url
        self._session = session
        self._routes = routes or Routes()
        self._givers = givers or Givers()
        self._first = self._routes.order[0]  # the transport that worked last
        self._staged: tuple[PolicyVersion, str] | None = None
        self._group = BroadcastGroup(self.command)
        self.ranks = 0
        self.lora_rank = 0
        self.connections = 0
        self._log = get_logger(__name__).bind(server=url)
        self._control_timeout = control_timeout

    @property
    def _sidecar(self) -> str:
        return self._routes.sidecar(self._url)

    async def weight_version(self, timeout: float = 2.0) -> str:
        """Sends GET /model_info; returns the version."""
        body = await self._json("GET", "/model_info", timeout=timeout)
        version = body.get("weight_version")
        if not isinstance(version, str):
            raise EngineError(Fault.GARBAGE, f"/model_info: weight_version is {version!r:.100}")
        return version

    async def boot_id(self) -> str:
        """Sends GET /server_info; returns start-up time and the seed drawn at the start."""
        body = await self._json("GET", "/server_info", timeout=self._control_timeout)
        boot = [body.get(key) for key in ("boot_id", "startup_time", "random_seed")]
        if all(part is None for part in boot):
            raise EngineError(Fault.GARBAGE, "/server_info: no startup_time and no random_seed")
        # Data-parallel copies would each want the ranks of one.
        size = [body.get(key, 1) for key in ("tp_size", "pp_size")]
        rank = body.get("max_lora_rank")
        self.lora_rank = rank if body.get("enable_lora") and type(rank) is int else 0
        copies = body.get("dp_size", 1) != 1
        self.ranks = 0 if copies or not all(type(n) is int for n in size) else math.prod(size)
        return "/".join(str(part) for part in boot)

    async def running(self) -> int:
        """Sends GET /v1/loads; returns the sum over data-parallel ranks.

        The scheduler answers it between two steps, and a long prefill on a CPU takes seconds.
        """
        body = await self._json("GET", "/v1/loads", timeout=self._control_timeout)
        try:
            return sum(
                int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])
                for load in body["loads"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(Fault.GARBAGE, f"/v1/loads: {error!r:.200}") from None

    async def stage(self, version: PolicyVersion, *, timeout: float) -> Fingerprint | None:
        """Sends POST /stage_weights to the CPU engine, or to the sidecar beside an SGLang."""
        self._staged = None
        tried = Tried(version, timeout)
        for transport in self._routes.starting_with(self._first):
            try:
                location, fingerprint = await self._stage_by(transport, version, tried.left())
            except EngineError as error:
                tried.failed(transport, error)
                continue
            self._chose(transport, tried)
            self._staged = version, location
            return fingerprint
        raise tried.error()

    async def receive(
        self, version: PolicyVersion, seat: Seat, *, timeout: float
    ) -> Fingerprint | None:
        """Sends POST /init_weights_update_group, then /stage_weights (names); SGLang: `load`."""
        self._staged = None
        async with self._group.failing():
            await self._group.join(seat)
            path, request = "/stage_weights", self._group.request(seat.tensors)
            request["digests"] = [tensor.digest for tensor in seat.tensors]
            status, text = await self._call("POST", path, request, timeout=timeout)
            if status in (404, 405):
                self._group.expected = version
                return None
            self._check_accepted(path, status, text)
            self._staged = version, str(self._parse(path, status, text).get("model_path"))
            return self._fingerprint(path, status, text)

    async def command(self, path: str, request: dict[str, Any], timeout: float) -> None:
        """Makes a call about weights; raises EngineError with the server's message if refused."""
        status, text = await self._call("POST", path, request, timeout=timeout)
        self._check_accepted(path, status, text)

    async def pause(self, mode: str) -> None:
        """Sends POST /pause_generation with the configured mode."""
        await self._json("POST", "/pause_generation", {"mode": mode}, timeout=self._control_timeout)

    async def load(self, version: PolicyVersion, *, flush_cache: bool, timeout: float) -> None:
        """Sends POST /update_weights_from_disk: what was staged, else by the first way that works.

        Or what `receive` left for now: /update_weights_from_distributed. `timeout` is for all ways
        together.
        """
        if self._group.expected is version:
            return await self._group.receive(version, flush_cache, timeout)
        tried = Tried(version, timeout)
        staged, self._staged = self._staged, None
        for transport in self._routes.starting_with(self._first):
            try:
                if staged is not None and staged[0] == version:
                    location, staged = staged[1], None
                else:
                    location, _ = await self._stage_by(transport, version, tried.left())
                await self._load_from(location, version, flush_cache, tried.left())
            except EngineError as error:
                tried.failed(transport, error)
                continue
            return self._chose(transport, tried)
        raise tried.error()

    def _chose(self, transport: str, tried: Tried) -> None:
        if tried.causes:
            self._log.warning(
                "transport_fell_back",
                version=tried.version.version,
                to=transport,
                cause="; ".join(tried.causes)[:500],
            )
        self._first = transport

    async def _stage_by(
        self, transport: str, version: PolicyVersion, timeout: float
    ) -> tuple[str, Fingerprint | None]:
        """Returns the model_path to load, and the checksum if the engine itself has read it.

        Within `timeout`, or twice what the version's bytes may take if that is less: the first half
        is for other servers, so that one slow server leaves the others the time to read the store.
        """
        begun = time.monotonic()
        limit = min(timeout, 2 * patience_s(version.size_bytes))
        half, deadline = begun + limit / 2, begun + limit
        if transport == "disk":
            return (await self._stage_from(version.path, deadline))[:2]
        store, name = self._routes.location(version), version.folder_name
        # A delta is small, and only the store has it. A sidecar has what another engine asked for.
        alone = version.delta is not None or self._givers.holds(name, self._sidecar)
        for _ in range(0 if alone else _GIVERS_TRIED):
            turn = None
            try:
                async with self._givers.turn(name, half - time.monotonic()) as turn:
                    source = f"{turn.giver}/versions/{name}" if turn.giver else store
                    location, fingerprint, turn.taker = await self._stage_from(source, deadline)
                    return location, fingerprint
            except CannotPullError:
                raise
            except EngineError as error:
                if turn is None or not turn.giver or error.fault is not Fault.UPDATE_REFUSED:
                    raise
                self._log.warning("giver_failed", giver=turn.giver, cause=str(error)[:300])
        return (await self._stage_from(store, deadline))[:2]

    async def _stage_from(
        self, source: str, deadline: float
    ) -> tuple[str, Fingerprint | None, str]:
        """Returns the result of `_stage_by`, and which server others can pull from now."""
        path = "/stage_weights"
        status, text = await self._read(path, source, deadline)
        if status not in (404, 405):
            self._check_accepted(path, status, text)
            return source, self._fingerprint(path, status, text), self._url
        if not is_fetched(source):
            return source, None, ""
        path = self._sidecar + path
        try:
            status, text = await self._read(path, source, deadline)
        except EngineError as error:
            message = f"this engine cannot download versions, and its sidecar failed: {error}"
            if error.fault is Fault.TIMEOUT:  # it may have waited for the giver
                raise EngineError(Fault.UPDATE_REFUSED, message) from None
            raise CannotPullError(message) from None
        self._check_accepted(path, status, text)
        folder = self._parse(path, status, text).get("model_path")
        if not isinstance(folder, str):
            raise EngineError(Fault.GARBAGE, f"{path}: model_path is {folder!r:.100}")
        return folder, None, self._sidecar

    async def _read(self, path: str, source: str, deadline: float) -> tuple[int, bytes]:
        """Has a version read ahead; an error for want of time says from where, and for how long."""
        left = max(0.1, deadline - time.monotonic())
        try:
            return await self._call("POST", path, {"model_path": source}, timeout=left)
        except EngineError as error:
            if error.fault is not Fault.TIMEOUT:
                raise
            raise EngineError(
                Fault.TIMEOUT, f"{path}: {source} was not read within {left:.1f} s"
            ) from None

    async def _load_from(
        self, location: str, version: PolicyVersion, flush_cache: bool, timeout: float
    ) -> None:
        path = "/update_weights_from_disk"
        request = {
            "model_path": location,
            "weight_version": version.name,
            "flush_cache": flush_cache,
        }
        status, text = await self._call("POST", path, request, timeout=timeout)
        self._check_accepted(path, status, text)

    def _check_accepted(self, path: str, status: int, text: bytes) -> None:
        """An update that is refused says why, with 400 or without."""
        body = self._parse(path, 200 if status == 400 else status, text)
        if status == 400 or body.get("success") is not True:
            message = str(body.get("message") or body.get("error_message") or body)[:300]
            raise EngineError(Fault.UPDATE_REFUSED, f"{path}: {message}")

    async def fingerprint(self, timeout: float) -> Fingerprint | None:
        """Sends POST /weights_checker; returns None for a 4xx: this build has no checksums."""
        status, text = await self._call(
            "POST", "/weights_checker", {"action": "checksum"}, timeout=timeout
        )
        if 400 <= status < 500:
            return None
        return self._fingerprint("/weights_checker", status, text)

    def _fingerprint(self, path: str, status: int, text: bytes) -> Fingerprint:
        body = self._parse(path, status, text)
        ranks = body.get("ranks") or [body]
        try:
            sums = [dict(rank["checksums"]) for rank in ranks]
            names = sorted({name for each in sums for name in each})
            if not names:
                raise ValueError("no tensors")
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(Fault.GARBAGE, f"{path}: {error!r:.200}") from None
        canonical = json.dumps(sorted(json.dumps(each, sort_keys=True) for each in sums))
        layout = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        return Fingerprint(
            layout=f"ranks{len(sums)}:tensors{len(names)}:{layout}",
            digest=hashlib.sha256(canonical.encode()).hexdigest(),
        )

    async def adapters(self) -> list[str]:
        """Sends GET /v1/models: each adapter is a model whose parent is the served one."""
        return listed_adapters(await self._json("GET", "/v1/models", timeout=self._control_timeout))

    async def load_adapter(self, version: PolicyVersion, *, timeout: float) -> None:
        """Sends POST /load_lora_adapter, from where the version is or a sidecar has put it."""
        tried = Tried(version, timeout)
        for transport in self._routes.starting_with(self._first):
            try:
                location = await self._adapter_location(transport, version, tried.left())
                request = {"lora_name": version.adapter_name, "lora_path": location}
                await self.command("/load_lora_adapter", request, tried.left())
            except EngineError as error:
                tried.failed(transport, error)
                continue
            return self._chose(transport, tried)
        raise tried.error()

    async def _adapter_location(
        self, transport: str, version: PolicyVersion, timeout: float
    ) -> str:
        if transport == "disk" and not in_object_store(version.path):
            return version.path
        source = version.path if transport == "disk" else self._routes.location(version)
        path, deadline = self._sidecar + "/stage_weights", time.monotonic() + timeout
        try:
            status, text = await self._read(path, source, deadline)
        except EngineError:  # none: areal-inference reads from the store itself
            return source
        self._check_accepted(path, status, text)
        return str(self._parse(path, status, text).get("model_path"))

    async def unload_adapter(self, name: str, *, timeout: float) -> None:
        """Sends POST /unload_lora_adapter with its name."""
        await self.command("/unload_lora_adapter", {"lora_name": name}, timeout)

    async def logprobs(self, prompt: list[int], version: str, adapter: str = "") -> list[float]:
        """Sends POST /generate; returns the prompt's logprobs, and has one greedy token sampled."""
        named = {"lora_path": adapter} if adapter else {}
        request = {
            **named,
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": version,
        }
        body = await self._json("POST", "/generate", request, timeout=self._control_timeout)
        try:
            entries = body["meta_info"]["input_token_logprobs"]
            values = [float(entry[0]) for entry in entries[1:]]
            if len(values) != len(prompt) - 1:
                raise ValueError(f"{len(values)} logprobs for {len(prompt)} tokens")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(Fault.GARBAGE, f"/generate: {error!r:.200}") from None
        return values

    async def resume(self) -> None:
        """Sends POST /continue_generation after a pause."""
        await self._json("POST", "/continue_generation", {}, timeout=self._control_timeout)

    async def sleep(self, mark: str) -> None:
        """POST /pause_generation, /flush_cache, /update_weight_version, /release_memory_occupation.

        SGLang ends itself if its scheduler is not idle when it releases memory: a step may still
        run when the last request has been answered, so the flush waits for it. The mark comes
        before the release: who finds it relies on nothing but `wake`.
        """
        limit = self._control_timeout
        await self.pause("abort")
        await self._empty("/flush_cache", {}, limit + 1.0, query=f"?timeout={limit:g}")
        await self._mark(mark)
        await self._empty("/release_memory_occupation", _MEMORY, limit)

    async def wake(self, mark: str) -> None:
        """Sends POST /resume_memory_occupation, then /update_weight_version."""
        await self._empty("/resume_memory_occupation", _MEMORY, self._control_timeout)
        await self._mark(mark)

    async def _mark(self, version: str) -> None:
        request = {"new_version": version, "abort_all_requests": False}
        await self.command("/update_weight_version", request, self._control_timeout)

    async def _empty(
        self, path: str, body: dict[str, Any], timeout: float, *, query: str = ""
    ) -> None:
        """A call whose answer says nothing but 200."""
        status, text = await self._call("POST", path + query, body, timeout=timeout)
        if status != 200:
            raise EngineError(Fault.HTTP_STATUS, f"{path}: HTTP {status}: {text[:200]!r}")

    async def abort_all(self) -> None:
        """Sends POST /abort_request (answered with an empty body)."""
        status, text = await self._call(
            "POST", "/abort_request", {"abort_all": True}, timeout=self._control_timeout
        )
        if status != 200:
            raise EngineError(Fault.HTTP_STATUS, f"/abort_request: HTTP {status}: {text[:200]!r}")

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
    ) -> dict[str, Any]:
        status, text = await self._call(method, path, body, timeout=timeout)
        return self._parse(path, status, text)

    def _parse(self, path: str, status: int, text: bytes) -> dict[str, Any]:
        if status != 200:
            words = " ".join(text[:300].decode(errors="replace").split())
            # 503 is how a server says that it is still loading its model.
            fault = Fault.UNREACHABLE if status == 503 else Fault.HTTP_STATUS
            raise EngineError(fault, f"{path}: HTTP {status}: {words}")
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise EngineError(Fault.GARBAGE, f"{path}: not a JSON object: {text[:100]!r}")
        return parsed

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
    ) -> tuple[int, bytes]:
        """Sends one request, its answer bounded in time and size; `path` may be a whole url."""
        own = "://" not in path
        url = self._url + path if own else path
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(
                    method,
                    url,
                    json=body,
                    allow_redirects=False,
                    trace_request_ctx=self if own else None,
                ) as response,
            ):
                chunks, size = [], 0
                async for chunk in response.content.iter_chunked(1 << 16):
                    size += len(chunk)
                    if size > _MAX_BODY_BYTES:
                        raise EngineError(
                            Fault.GARBAGE, f"{path}: answer larger than {_MAX_BODY_BYTES} bytes"
                        )
                    chunks.append(chunk)
                return response.status, b"".join(chunks)
        except TimeoutError:
            raise EngineError(Fault.TIMEOUT, f"{path}: no answer within {timeout:.1f} s") from None
        except aiohttp.ClientConnectorError as error:
            raise EngineError(
                Fault.UNREACHABLE, f"{path}: cannot connect: {error.os_error.strerror or error}"
            ) from None
        except UnicodeError as error:  # a name that cannot be looked up
            raise EngineError(Fault.UNREACHABLE, f"{path}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise EngineError(Fault.GARBAGE, f"{path}: {detail:.200}") from None
