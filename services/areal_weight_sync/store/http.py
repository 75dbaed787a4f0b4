"""The weight store over HTTP.

| request                                | answers                                           |
|----------------------------------------|---------------------------------------------------|
| POST /versions/NAME       (manifest)   | 201: upload begun                                 |
| PUT  /versions/NAME/FILE Content-Range | 204: stored; Areal-Digest checks this chunk       |
| POST /versions/NAME/commit             | 200 {"path"}: complete, checked, visible          |
| GET  /versions/NAME/FILE  Range        | 200 or 206                                        |
| GET  /versions/NAME/manifest.json      | 200: what PublishVersion was given                |
| GET  /versions/NAME                    | 200 {"files"}: tokenizer and configuration        |

Errors are {"error": one line}: 400 bad request, 401 no token, 404 not found, 507 disk full.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import xxhash
from aiohttp import web

from areal.chassis.http_connections import HttpSite
from areal.chassis.logging import get_logger
from areal.errors import ArealError, CapacityExceeded, InvalidInput, NotFound
from areal.security import UNAUTHENTICATED, Security
from areal.weights.delta import FILE
from areal.weights.manifest import (
    MANIFEST,
    PolicyVersion,
    from_json,
    read_manifest,
    to_json,
)
from areal.weights.publisher import companions
from areal.weights.safetensors import file_digest
from areal.weights.store_client import DIGEST_HEADER, MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES
from areal_weight_sync.store.weights import WeightStore

_LISTEN_AGAIN_S = 1.0
# A trainer gathers tensors, and a server checks files, between two requests of a connection.
_IDLE_S = 600.0
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StoreApp:
    """The HTTP application of a weight store.

    Args:
        store: Files.
        known: Versions that lie elsewhere: the configured model, folders on a volume.
        base: Version 0.
        security: The token that requests must carry.
    """

    def __init__(
        self,
        store: WeightStore,
        known: Callable[[], list[PolicyVersion]],
        base: Callable[[], PolicyVersion | None],
        security: Security,
    ) -> None:
        self._store = store
        self._known = known
        self._base = base
        self._security = security
        self._uploads: dict[str, PolicyVersion] = {}
        self._runner: web.AppRunner | None = None
        self._log = get_logger(__name__)

    async def listen(self, host: str, port: int) -> None:
        """Listens as soon as the address is free; a coordinator that hangs may still hold it."""
        while True:
            try:
                return await self.start(host, port)
            except OSError as error:
                self._log.warning(
                    "weight_store_cannot_listen", host=host, port=port, cause=str(error)
                )
                await self.close()
                # The kernel tells no one when an address becomes free.
                await asyncio.sleep(_LISTEN_AGAIN_S)

    async def start(self, host: str, port: int) -> None:
        """Starts to listen; raises OSError."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_MANIFEST_BYTES)
        app.add_routes(
            [
                web.post("/versions/{name}", self._begin),
                web.put("/versions/{name}/{file}", self._put),
                web.post("/versions/{name}/commit", self._commit),
                web.get("/versions/{name}/{file}", self._get),
                web.get("/versions/{name}", self._companions),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=2.0, keepalive_timeout=_IDLE_S
        )
        await self._runner.setup()
        await HttpSite(self._runner, host, port).start()

    async def close(self) -> None:
        """Stops listening and ends open requests."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        why = self._security.foreign(request.headers.get)
        if why or not self._security.admits(request.headers.get("Authorization")):
            return _refusal(why or UNAUTHENTICATED, 403 if why else 401)
        try:
            return await handler(request)
        except CapacityExceeded as error:  # of the disk, not of a queue
            return _refusal(str(error), 507)
        except ArealError as error:
            return _refusal(str(error), error.http_status)
        except OSError as error:
            status = 404 if error.errno == errno.ENAMETOOLONG else 507
            return _refusal(f"weight store: {error.strerror or error}", status)

    async def _begin(self, request: web.Request) -> web.Response:
        manifest = from_json(await request.read())
        name = request.match_info["name"]
        if name != manifest.folder_name:
            raise InvalidInput(f"version {name[:80]!r}: its manifest belongs to another version")
        await asyncio.to_thread(self._store.begin, manifest, self._base())
        # A trainer uploads one version at a time: what an earlier one left unfinished is dropped.
        self._uploads = {name: manifest}
        return web.json_response({"name": name}, status=201)

    async def _put(self, request: web.Request) -> web.Response:
        """Writes bytes to the file as they arrive; collects nothing in memory."""
        name, file = request.match_info["name"], request.match_info["file"]
        match = _RANGE.fullmatch(request.headers.get("Content-Range", ""))
        if match is None:
            raise InvalidInput("Content-Range: expected `bytes FIRST-LAST/TOTAL`")
        begin, end = int(match[1]), int(match[2]) + 1
        if end - begin > MAX_CHUNK_BYTES or request.content_length != end - begin:
            raise InvalidInput(
                f"{name}/{file}: a body of {request.content_length} bytes for bytes {begin} to "
                f"{end}, expected that many, at most {MAX_CHUNK_BYTES}"
            )
        descriptor = self._store.open_upload(name, file, begin, end)
        digest, offset = xxhash.xxh3_128(), begin
        try:
            async for part in request.content.iter_any():
                digest.update(part)
                os.pwrite(descriptor, part, offset)
                offset += len(part)
        finally:
            os.close(descriptor)
        expected = request.headers.get(DIGEST_HEADER, "")
        if offset != end or digest.hexdigest() != expected:
            raise InvalidInput(
                f"{name}/{file}: bytes {begin} to {end} have digest {digest.hexdigest()[:16]}…, "
                f"expected {expected[:16]}…"
            )
        return web.Response(status=204)

    async def _commit(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        manifest = self._uploads.get(name)
        if manifest is None:
            raise NotFound(f"version {name[:80]!r}: no upload was begun")
        folder = await asyncio.to_thread(self._store.commit, name, manifest)
        self._uploads.pop(name, None)  # the next upload may have begun
        return web.json_response({"path": str(folder)})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        name, file = request.match_info["name"], request.match_info["file"]
        version = await self._version(name)
        if file == MANIFEST:
            return web.Response(text=to_json(version), content_type="application/json")
        folder = Path(version.path)
        declared = file in {entry.name for entry in version.files}
        declared = declared or (file == FILE and version.delta is not None)
        if not declared and file not in {f.name for f in companions(folder)}:
            raise NotFound(f"{name}/{file[:80]}: no file of this version")
        return web.FileResponse(folder / file, chunk_size=1 << 20)

    async def _companions(self, request: web.Request) -> web.Response:
        version = await self._version(request.match_info["name"])
        files = [
            {"name": f.name, "size_bytes": f.stat().st_size, "digest": file_digest(f)}
            for f in companions(Path(version.path))
        ]
        return web.json_response({"files": files})

    async def _version(self, name: str) -> PolicyVersion:
        for version in self._known():
            if version.folder_name == name:
                return version
        return await asyncio.to_thread(read_manifest, self._store.folder(name))


def _refusal(message: str, status: int) -> web.Response:
    return web.json_response({"error": message}, status=status)
