"""An inference server over HTTP: SGLang's endpoints, with a deadline and a clear cause each.

What real SGLang needs to be told or spared:
- in_place keeps the KV cache, so the load must say `flush_cache: false`: with the default it
  answers 400 although weights and version have changed.
- /health generates a token and takes a second: /model_info and /v1/loads are the probes.
- only /v1/loads is answered by the scheduler; /model_info by the HTTP process before it.
- the weight_version of /server_info's top level is the one at the start: never read here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from areal.errors import InvalidInput
from areal.weights import PolicyVersion
from areal_weight_sync.engine import EngineError, Fault, Fingerprint

_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9._:-]{0,252}")
_MAX_BODY_BYTES = 16 * 1024 * 1024


def normalize_url(url: str) -> tuple[str, str]:
    """(server_id, url) in one spelling; raises InvalidInput."""
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


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """For all servers of a coordinator: no pool limit, deadlines per call.

    Args:
        headers: Sent with every request: the bearer token (SGLang's `--api-key`).
    """
    return aiohttp.ClientSession(
        # Below the 5 s after which uvicorn closes idle connections: never reuse a dead one.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Accept-Encoding": "identity", **headers},
    )


class HttpEngine:
    """See `engine.Engine`."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        probe_timeout: float = 2.0,
        control_timeout: float = 10.0,
    ) -> None:
        self._url = url
        self._session = session
        self._probe_timeout = probe_timeout
        self._control_timeout = control_timeout

    async def weight_version(self) -> str:
        """GET /model_info."""
        body = await self._json("GET", "/model_info", timeout=self._probe_timeout)
        version = body.get("weight_version")
        if not isinstance(version, str):
            raise EngineError(Fault.GARBAGE, f"/model_info: weight_version is {version!r:.100}")
        return version

    async def boot_id(self) -> str:
        """GET /server_info: start-up time and the seed drawn at the start."""
        body = await self._json("GET", "/server_info", timeout=self._control_timeout)
        boot = [body.get(key) for key in ("boot_id", "startup_time", "random_seed")]
        if all(part is None for part in boot):
            raise EngineError(Fault.GARBAGE, "/server_info: no startup_time and no random_seed")
        return "/".join(str(part) for part in boot)

    async def running(self) -> int:
        """GET /v1/loads, summed over data-parallel ranks.

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
        """POST /stage_weights, which only the embedded engine has: 404 means no."""
        path = "/stage_weights"
        status, text = await self._call("POST", path, {"model_path": version.path}, timeout=timeout)
        if status == 400:
            message = str(self._parse(path, 200, text).get("message", text))[:300]
            raise EngineError(Fault.UPDATE_REFUSED, f"{path}: {message}")
        return None if status in (404, 405) else self._fingerprint(path, status, text)

    async def pause(self, mode: str) -> None:
        """POST /pause_generation."""
        await self._json("POST", "/pause_generation", {"mode": mode}, timeout=self._control_timeout)

    async def load(self, version: PolicyVersion, *, flush_cache: bool, timeout: float) -> None:
        """POST /update_weights_from_disk."""
        request = {
            "model_path": version.path,
            "weight_version": version.name,
            "flush_cache": flush_cache,
        }
        body = await self._json("POST", "/update_weights_from_disk", request, timeout=timeout)
        if body.get("success") is not True:
            message = str(body.get("message", body))[:300]
            raise EngineError(Fault.UPDATE_REFUSED, f"/update_weights_from_disk: {message}")

    async def fingerprint(self, timeout: float) -> Fingerprint | None:
        """POST /weights_checker; None for a 4xx: this build or platform has no checksums."""
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

    async def logprobs(self, prompt: list[int], version: str) -> list[float]:
        """POST /generate: the prompt's logprobs and one greedy token."""
        request = {
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
        """POST /continue_generation."""
        await self._json("POST", "/continue_generation", {}, timeout=self._control_timeout)

    async def abort_all(self) -> None:
        """POST /abort_request (answers with an empty body)."""
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
        """One request, its answer bounded in time and size."""
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(
                    method, self._url + path, json=body, allow_redirects=False
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
