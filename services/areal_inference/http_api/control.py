"""Control endpoints: pause, continue, abort, flush, weights and their version."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as StarletteRoute

from areal.errors import InvalidInput
from areal.weights.publisher import TransportError
from areal_inference.api import RequestError, SchemaError
from areal_inference.decode.scheduler import PAUSE_MODES, Scheduler
from areal_inference.frontend import Frontend
from areal_inference.http_api.giving import Giving
from areal_inference.http_api.requests import COMMON, guarded, json_response, read_object
from areal_inference.http_api.weight_groups import RECEIVE, GroupRoutes, Groups, MemorySource, done

if TYPE_CHECKING:
    from areal_inference.model.sources import Source
    from areal_inference.model.weights import WeightSet

_MAX_FLUSH_WAIT_S = 3600.0
_PAUSE = {**COMMON, "mode": str}
_CONTINUE = {**COMMON, "torch_empty_cache": bool}
_MEMORY = {**COMMON, "tags": list}
_TAGS = ("kv_cache", "weights", "cuda_graph")
_ABORT = {
    "rid": str,
    "http_worker_ipc": object,
    "abort_all": bool,
    "finished_reason": object,
    "abort_message": str,
    "weight_versions": object,
}
_UPDATE = {
    **COMMON,
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
_STAGE: dict[str, type] = {"model_path": str, **RECEIVE}
_VERSION = {**COMMON, "new_version": str, "abort_all_requests": bool}
_CHECKER = {
    **COMMON,
    "action": str,
    "allow_quant_error": bool,
    "skip_tensor_list": list,
    "selector": str,
}


def control_routes(frontend: Frontend, headers: Mapping[str, str]) -> list[StarletteRoute]:
    """Returns all control endpoints; `headers` are those that a weight store requires."""
    control = _Control(frontend, headers)
    groups = GroupRoutes(control.groups, frontend, control.adopt)
    giving = Giving(control.sets)
    return [
        StarletteRoute(path, guarded(handler), methods=methods)
        for path, handler, methods in (
            ("/pause_generation", control.pause, ["POST"]),
            ("/continue_generation", control.resume, ["POST"]),
            ("/abort_request", control.abort, ["POST"]),
            ("/flush_cache", control.flush, ["GET", "POST"]),
            ("/release_memory_occupation", control.release, ["POST"]),
            ("/resume_memory_occupation", control.regain, ["POST"]),
            ("/stage_weights", control.stage, ["POST"]),
            ("/update_weights_from_disk", control.update_from_disk, ["POST"]),
            ("/init_weights_update_group", groups.join_group, ["POST"]),
            ("/destroy_weights_update_group", groups.leave_group, ["POST"]),
            ("/begin_weight_update", groups.begin_update, ["POST"]),
            ("/update_weights_from_distributed", groups.receive, ["POST"]),
            ("/end_weight_update", groups.end_update, ["POST"]),
            ("/update_weight_version", control.update_version, ["POST"]),
            ("/weights_checker", control.check_weights, ["POST"]),
            ("/versions/{name}/{file}", giving.get, ["GET"]),
        )
    ]


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights read ahead of their use."""

    stamp: tuple[Any, ...]
    """The state of the folder when it was read; see `folder_stamp`."""
    weights: WeightSet


def folder_stamp(location: str) -> tuple[Any, ...]:
    """Differs when a file of the folder was replaced; what is no folder has one too."""
    try:
        with os.scandir(location) as entries:
            files = sorted((e.name, e.stat().st_ino, e.stat().st_mtime_ns) for e in entries)
    except OSError:
        files = []
    return (location, *files)


class _Control:
    def __init__(self, frontend: Frontend, headers: Mapping[str, str]):
        self._frontend = frontend
        self._headers = headers
        self._timeout = frontend.config.command_timeout_s
        self._staged: Staged | None = None
        self._spare: WeightSet | None = (
            None  # the set before the current one: the next load fills it
        )
        self.groups = Groups(frontend.model)

    def sets(self) -> Iterator[WeightSet]:
        """Returns all sets of weights in memory, beginning with the one that serves."""
        if not self._frontend.scheduler.unloaded:
            yield self._frontend.runner.model.weights
        if self._staged is not None:
            yield self._staged.weights
        if self._spare is not None:
            yield self._spare

    async def pause(self, http: HttpRequest) -> Response:
        """Stops decoding: abort (default), retract or in_place."""
        body = await read_object(http, _PAUSE)
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise SchemaError(f"mode: {mode!r}, expected one of {list(PAUSE_MODES)}")
        self._frontend.check_ready()
        await self._frontend.engine.call(lambda s: s.pause(mode), self._timeout)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: HttpRequest) -> Response:
        """Continues decoding after a pause."""
        await read_object(http, _CONTINUE)
        self._frontend.check_ready()

        def go_on(scheduler: Scheduler) -> None:
            _check_awake(scheduler)
            if scheduler.unloaded:
                raise RequestError(
                    "continue_generation: the weights were released: expected "
                    "/update_weights_from_disk first"
                )
            scheduler.resume()

        await self._frontend.engine.call(go_on, self._timeout)
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def release(self, http: HttpRequest) -> Response:
        """Gives memory up (`tags`: kv_cache, weights, cuda_graph; all without): requests wait.

        SGLang ends itself if requests are running; this engine refuses, and changes nothing.
        """
        tags = await _tags(http)
        self._frontend.check_ready()

        def give_up(scheduler: Scheduler) -> None:
            if not scheduler.release(tags):
                count = len(scheduler.running) or len(scheduler.waiting)
                raise RequestError(
                    f"release_memory_occupation: {count} requests are running: expected "
                    "/pause_generation with mode abort or retract before. Nothing was changed."
                )

        async with self._frontend.weights_lock:
            await self._frontend.engine.call(give_up, self._timeout)
            if "weights" in tags:
                self._staged = self._spare = None
        return json_response(None)

    async def regain(self, http: HttpRequest) -> Response:
        """Takes memory back. As SGLang's, released weights hold nothing until they are loaded."""
        tags = await _tags(http)
        self._frontend.check_ready()
        await self._frontend.engine.call(lambda s: s.regain(tags), self._timeout)
        return json_response(None)

    async def abort(self, http: HttpRequest) -> Response:
        """Finishes one request, or all, with their partial output; unknown ids are no error."""
        body = await read_object(http, _ABORT)
        self._frontend.check_ready()
        if body.get("abort_all", False):
            await self._frontend.abort(None)
        elif "rid" in body:
            await self._frontend.abort(body["rid"])
        return Response(status_code=200)

    async def flush(self, http: HttpRequest) -> Response:
        """Gives the cache back; with ?timeout=s waits that long for running requests."""
        try:
            timeout = float(http.query_params.get("timeout", "0"))
        except ValueError:
            timeout = -1.0
        if not 0.0 <= timeout <= _MAX_FLUSH_WAIT_S:  # NaN is not, either
            raise SchemaError(f"timeout: expected 0 to {_MAX_FLUSH_WAIT_S:.0f} seconds")
        self._frontend.check_ready()
        try:
            flushed = await self._frontend.engine.call(
                lambda s: s.flush(), timeout or self._timeout, exclusive=timeout > 0
            )
        except TimeoutError:
            return PlainTextResponse("Timed out waiting for idle state.\n", 400)
        if not flushed:
            return PlainTextResponse("Flush cache failed.\n", 400)
        return PlainTextResponse("Cache flushed.\n")

    async def stage(self, http: HttpRequest) -> Response:
        """Ours, not SGLang's: read and check weights while requests run; answers their checksums.

        `model_path` is a folder, or a version of a weight store: http://host:port/versions/NAME.
        With `names` instead (and what else /update_weights_from_distributed takes, and digests)
        a broadcast is received, and the answer's `model_path` is what it is called from then on.

        An update_weights_from_disk of the same place that follows, with `flush_cache: false`,
        swaps references between two decode steps: it needs no pause and waits for no one.
        """
        body = await read_object(http, _STAGE)
        if "model_path" not in body and "names" not in body:
            raise SchemaError("model_path: missing, expected a folder with safetensors")
        self._frontend.check_ready()
        try:
            location, source = body.get("model_path", ""), None
            if not location:
                location, source = self.groups.location(), MemorySource()
                await self.groups.receive(body, source)
            async with self._frontend.weights_lock:
                self._staged = await self._read(location, source)
                checksums = self._staged.weights.checksums()
        except (InvalidInput, TransportError) as error:
            return done(str(error), success=False)
        return _checksums(checksums, model_path=location)

    async def adopt(self, source: MemorySource, body: dict[str, Any]) -> None:
        """Makes what was received the weights that serve."""
        body = {"model_path": self.groups.location(), **body}
        async with self._frontend.weights_lock:
            self._staged = await self._read(body["model_path"], source)
            await self._update(body)

    async def _read(self, location: str, source: Source | None = None) -> Staged:
        """A checked set that no one uses yet, and its checksums; called with the lock held."""
        import torch

        from areal_inference.model.weights import load_weights

        frontend = self._frontend
        _check_awake(frontend.scheduler)
        dtype: torch.dtype = getattr(torch, frontend.config.dtype)
        if self._staged is not None:  # and never asked for
            self._spare, self._staged = self._staged.weights, None

        def read() -> Staged:
            stamp = folder_stamp(location)
            weights = load_weights(
                location,
                frontend.model,
                dtype,
                storage=frontend.storage,
                headers=self._headers,
                spare=self._spare,
                held=None if frontend.scheduler.unloaded else frontend.runner.model.weights,
                source=source,
            )
            weights.checksums()  # now: later somebody waits for them
            return Staged(stamp, weights)

        staged = await asyncio.to_thread(read)
        self._spare = None
        return staged

    async def update_from_disk(self, http: HttpRequest) -> Response:
        """Loads a checkpoint folder; all of it is checked before anything changes."""
        body = await read_object(http, _UPDATE)
        if "model_path" not in body:
            raise SchemaError("model_path: missing, expected a folder with safetensors")
        self._frontend.check_ready()
        async with self._frontend.weights_lock:
            try:
                count = await self._update(body)
            except (InvalidInput, TransportError, TimeoutError) as error:
                return json_response(
                    {"success": False, "message": str(error), "num_paused_requests": 0}, 400
                )
        message = "Succeeded to update model weights."
        if "weight_version" in body:
            message += f" Weight version updated to {body['weight_version']}."
        return json_response({"success": True, "message": message, "num_paused_requests": count})

    async def _update(self, body: dict[str, Any]) -> int:
        """Returns how many requests keep running on the new weights."""
        frontend = self._frontend
        if body.get("load_format", "auto") not in ("auto", "safetensors"):
            raise RequestError(
                f"load_format: {body['load_format']!r}, expected auto or safetensors"
            )
        if "manifest" in body:
            raise RequestError("manifest: not supported by this engine")
        began = time.monotonic()
        location: str = body["model_path"]
        ahead = self._staged is not None and self._staged.stamp == folder_stamp(location)
        if not ahead:
            self._staged = await self._read(location)
        fresh = self._staged
        assert fresh is not None
        flush = body.get("flush_cache", True)

        before = None if frontend.scheduler.unloaded else frontend.runner.model.weights

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
            await frontend.abort(None)
        count = await frontend.engine.call(swap, self._timeout, exclusive=flush or not ahead)
        frontend.model_path = location
        self._spare, self._staged = before, None
        return count

    async def update_version(self, http: HttpRequest) -> Response:
        """Renames the current weights' version; aborts everything unless told not to."""
        body = await read_object(http, _VERSION)
        if "new_version" not in body:
            raise SchemaError("new_version: missing, expected a string")
        self._frontend.check_ready()
        version: str = body["new_version"]
        if body.get("abort_all_requests", True):
            await self._frontend.abort(None)

        def rename(scheduler: Scheduler) -> None:
            scheduler.weight_version = version

        await self._frontend.engine.call(rename, self._timeout)
        return json_response(
            {
                "success": True,
                "message": f"Weight version updated to {version}",
                "new_version": version,
            }
        )

    async def check_weights(self, http: HttpRequest) -> Response:
        """action=checksum: one per tensor, and one over all of them."""
        body = await read_object(http, _CHECKER)
        if body.get("action") != "checksum":
            raise SchemaError(f"action: {body.get('action')!r}, expected 'checksum'")
        self._frontend.check_ready()
        runner = self._frontend.runner
        if self._frontend.scheduler.unloaded:
            raise RequestError("weights_checker: the weights were released: expected a load first")
        async with self._frontend.weights_lock:  # or the set being read might become the spare one
            weights, version = await self._frontend.engine.call(
                lambda s: (runner.model.weights, s.weight_version), self._timeout
            )
            checksums = await asyncio.to_thread(weights.checksums)
        return _checksums(checksums, weight_version=version)


async def _tags(http: HttpRequest) -> frozenset[str]:
    tags = (await read_object(http, _MEMORY)).get("tags") or list(_TAGS)
    if unknown := [tag for tag in tags if tag not in _TAGS]:
        raise SchemaError(f"tags: {unknown[0]!r:.100}, expected one of {list(_TAGS)}")
    return frozenset(tags)


def _check_awake(scheduler: Scheduler) -> None:
    if scheduler.released:
        raise RequestError(
            f"memory is released ({', '.join(sorted(scheduler.released))}): expected "
            "/resume_memory_occupation first"
        )


def _checksums(checksums: dict[str, str], **more: str) -> Response:
    """Returns SGLang's answer to /weights_checker: one checksum per tensor, and one over all."""
    total = xxhash.xxh3_128()
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
