"""Control endpoints: pause, continue, abort, flush, weights and their version."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as StarletteRoute

from areal.errors import InvalidInput, Unavailable
from areal_inference.api import RequestError, SchemaError
from areal_inference.http import guarded, json_response, read_object
from areal_inference.scheduler import PAUSE_MODES, Scheduler
from areal_inference.service import Service

if TYPE_CHECKING:
    from areal_inference.weights import Weights

_COMMON: dict[str, type] = {"rid": object, "http_worker_ipc": object}
_PAUSE = {**_COMMON, "mode": str}
_CONTINUE = {**_COMMON, "torch_empty_cache": bool}
_ABORT = {
    "rid": str,
    "http_worker_ipc": object,
    "abort_all": bool,
    "finished_reason": object,
    "abort_message": str,
    "weight_versions": object,
}
_UPDATE = {
    **_COMMON,
    "model_path": str,
    "load_format": str,
    "abort_all_requests": bool,
    "weight_version": str,
    "is_async": bool,
    "torch_empty_cache": bool,
    "keep_pause": bool,
    "recapture_cuda_graph": bool,
    "token_step": int,
    "flush_cache": bool,
    "manifest": dict,
}
_STAGE: dict[str, type] = {"model_path": str}
_VERSION = {**_COMMON, "new_version": str, "abort_all_requests": bool}
_CHECKER = {
    **_COMMON,
    "action": str,
    "allow_quant_error": bool,
    "skip_tensor_list": list,
    "selector": str,
}


def control_routes(service: Service) -> list[StarletteRoute]:
    """All control endpoints of a service."""
    control = _Control(service)
    return [
        StarletteRoute(path, guarded(handler), methods=methods)
        for path, handler, methods in (
            ("/pause_generation", control.pause, ["POST"]),
            ("/continue_generation", control.resume, ["POST"]),
            ("/abort_request", control.abort, ["POST"]),
            ("/flush_cache", control.flush, ["GET", "POST"]),
            ("/stage_weights", control.stage, ["POST"]),
            ("/update_weights_from_disk", control.update_from_disk, ["POST"]),
            ("/update_weight_version", control.update_version, ["POST"]),
            ("/weights_checker", control.check_weights, ["POST"]),
        )
    ]


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights read ahead of their use."""

    stamp: tuple[Any, ...]
    """What the folder was when it was read; see `folder_stamp`."""
    weights: Weights
    checksums: dict[str, str]


def folder_stamp(folder: Path) -> tuple[Any, ...]:
    """Differs when a file of the folder was replaced; empty files and folders have one too."""
    try:
        with os.scandir(folder) as entries:
            files = sorted((e.name, e.stat().st_ino, e.stat().st_mtime_ns) for e in entries)
    except OSError:
        files = []
    return (str(folder), *files)


class _Control:
    def __init__(self, service: Service):
        self._service = service
        self._timeout = service.config.command_timeout_s
        self._staged: Staged | None = None
        self._in_use: Staged | None = None

    async def pause(self, http: HttpRequest) -> Response:
        """Stop decoding: abort (default), retract or in_place."""
        body = await read_object(http, _PAUSE)
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise SchemaError(f"mode: {mode!r}, expected one of {list(PAUSE_MODES)}")
        self._require_ready()
        await self._service.engine.call(lambda s: s.pause(mode), self._timeout)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: HttpRequest) -> Response:
        """Go on decoding."""
        await read_object(http, _CONTINUE)
        self._require_ready()
        await self._service.engine.call(lambda s: s.resume(), self._timeout)
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, http: HttpRequest) -> Response:
        """Finish one request, or all, with their partial output; unknown ids are no error."""
        body = await read_object(http, _ABORT)
        self._require_ready()
        if body.get("abort_all", False):
            await self._service.abort(None)
        elif "rid" in body:
            await self._service.abort(body["rid"])
        return Response(status_code=200)

    async def flush(self, http: HttpRequest) -> Response:
        """Give the cache back; with ?timeout=s wait that long for running requests."""
        try:
            timeout = float(http.query_params.get("timeout", "0"))
        except ValueError:
            raise SchemaError("timeout: expected seconds") from None
        self._require_ready()
        try:
            flushed = await self._service.engine.call(
                lambda s: s.flush(), timeout or self._timeout, exclusive=timeout > 0
            )
        except TimeoutError:
            return PlainTextResponse("Timed out waiting for idle state.\n", 400)
        if not flushed:
            return PlainTextResponse("Flush cache failed.\n", 400)
        return PlainTextResponse("Cache flushed.\n")

    async def stage(self, http: HttpRequest) -> Response:
        """Ours, not SGLang's: read and check a folder while requests run; answers its checksums.

        An update_weights_from_disk of the same folder that follows, with `flush_cache: false`,
        swaps references between two decode steps: it needs no pause and waits for nobody.
        """
        body = await read_object(http, _STAGE)
        if "model_path" not in body:
            raise SchemaError("model_path: missing, expected a folder with safetensors")
        self._require_ready()
        async with self._service.weights_lock:
            self._staged = None
            try:
                self._staged = await asyncio.to_thread(self._read, Path(body["model_path"]))
            except InvalidInput as error:
                return json_response({"success": False, "message": str(error)}, 400)
            return _checksums(self._staged.checksums)

    def _read(self, folder: Path) -> Staged:
        """In a thread: a folder's weights and their checksums."""
        import torch

        from areal_inference.weights import load_weights

        stamp = folder_stamp(folder)
        dtype: torch.dtype = getattr(torch, self._service.config.dtype)
        weights = load_weights(folder, self._service.model, dtype)
        return Staged(stamp, weights, weights.checksums())

    async def update_from_disk(self, http: HttpRequest) -> Response:
        """Load a checkpoint folder; all of it is checked before anything changes."""
        body = await read_object(http, _UPDATE)
        if "model_path" not in body:
            raise SchemaError("model_path: missing, expected a folder with safetensors")
        self._require_ready()
        async with self._service.weights_lock:
            try:
                count = await self._update(body)
            except (InvalidInput, TimeoutError) as error:
                return json_response(
                    {"success": False, "message": str(error), "num_paused_requests": 0}, 400
                )
        message = "Succeeded to update model weights."
        if "weight_version" in body:
            message += f" Weight version updated to {body['weight_version']}."
        return json_response({"success": True, "message": message, "num_paused_requests": count})

    async def _update(self, body: dict[str, Any]) -> int:
        """Returns how many requests keep running on the new weights."""
        service = self._service
        if body.get("load_format", "auto") not in ("auto", "safetensors"):
            raise RequestError(
                f"load_format: {body['load_format']!r}, expected auto or safetensors"
            )
        if "manifest" in body:
            raise RequestError("manifest: not supported by this engine")
        began = time.monotonic()
        folder = Path(body["model_path"])
        staged, self._staged = self._staged, None
        ahead = staged is not None and staged.stamp == folder_stamp(folder)
        if staged is None or not ahead:
            staged = await asyncio.to_thread(self._read, folder)
        fresh = staged
        flush = body.get("flush_cache", True)

        def swap(scheduler: Scheduler) -> int:
            if flush and scheduler.running:
                raise RequestError(
                    f"flush_cache: true, but {len(scheduler.running)} requests are paused in place "
                    "and need their cache; expected false. Nothing was changed."
                )
            scheduler.set_weights(
                fresh.weights, body.get("weight_version"), time.monotonic() - began
            )
            if flush:
                scheduler.flush()
            return len(scheduler.running)

        if body.get("abort_all_requests", False):
            await service.abort(None)
        count = await service.engine.call(swap, self._timeout, exclusive=flush or not ahead)
        service.model_path = body["model_path"]
        self._in_use = fresh
        return count

    async def update_version(self, http: HttpRequest) -> Response:
        """Rename the current weights' version; aborts everything unless told not to."""
        body = await read_object(http, _VERSION)
        if "new_version" not in body:
            raise SchemaError("new_version: missing, expected a string")
        self._require_ready()
        version: str = body["new_version"]
        if body.get("abort_all_requests", True):
            await self._service.abort(None)

        def rename(scheduler: Scheduler) -> None:
            scheduler.weight_version = version

        await self._service.engine.call(rename, self._timeout)
        return json_response(
            {
                "success": True,
                "message": f"Weight version updated to {version}",
                "new_version": version,
            }
        )

    async def check_weights(self, http: HttpRequest) -> Response:
        """action=checksum: SHA-256 per tensor, and one over all of them."""
        body = await read_object(http, _CHECKER)
        if body.get("action") != "checksum":
            raise SchemaError(f"action: {body.get('action')!r}, expected 'checksum'")
        self._require_ready()
        runner = self._service.runner
        # A set of weights never changes once loaded, so it can be read while requests run.
        weights, version = await self._service.engine.call(
            lambda s: (runner.model.weights, s.weight_version), self._timeout
        )
        if self._in_use is not None and self._in_use.weights is weights:
            checksums = self._in_use.checksums
        else:
            checksums = await asyncio.to_thread(weights.checksums)
        return _checksums(checksums, weight_version=version)

    def _require_ready(self) -> None:
        if not self._service.ready:
            raise Unavailable("server is starting: the model is being loaded")


def _checksums(checksums: dict[str, str], **more: str) -> Response:
    """SGLang's answer to /weights_checker: SHA-256 per tensor, and one over all of them."""
    total = hashlib.sha256()
    for name in sorted(checksums):
        total.update(f"{name} {checksums[name]}\n".encode())
    return json_response(
        {
            "success": True,
            "message": "",
            "ranks": [{"rank": 0, "checksums": checksums}],
            "per_engine_checksum": total.hexdigest(),
            **more,
        }
    )
