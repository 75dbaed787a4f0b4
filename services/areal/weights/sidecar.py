"""Runs beside an unmodified SGLang: fetches versions into a memory-backed folder for it to load.

    weight-sync ── POST /stage_weights {"model_path": http://store/versions/NAME} ──> sidecar
                <─ {"success": true, "model_path": "/dev/shm/areal-weights/NAME"} ──┘
    weight-sync ── pause, POST /update_weights_from_disk {"model_path": …} ──> SGLang

One sidecar serves all engines of its host (or pod), which must see its folder. areal-inference does
the same itself, so weight-sync sends both the same requests. Other sidecars pull versions from a
sidecar that has them: see `areal_weight_sync.engine.givers`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

from aiohttp import web

from areal.chassis.files import foreign_owner
from areal.chassis.http_app import HttpApp
from areal.chassis.logging import configure_logging
from areal.errors import ArealError, InvalidInput, NotFound
from areal.security import Security
from areal.weights.fetch import fetch_version
from areal.weights.manifest import MANIFEST, parse_version_dir, read_manifest

_MAX_BODY_BYTES = 64 << 10


class Sidecar(HttpApp):
    """The HTTP application; one fetch at a time, repeated requests for one version share it."""

    open_paths = frozenset({"/healthz"})

    def __init__(self, folder: Path, security: Security) -> None:
        """Keeps the two newest versions below `folder`."""
        super().__init__(security, max_body_bytes=_MAX_BODY_BYTES)
        self._folder = folder
        self._fetching = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/stage_weights", self._stage),
            web.get("/versions/{name}/{file}", self._give),
            web.get("/healthz", self._health),
        ]

    def refusal(self, request: web.Request, error: ArealError, status: int) -> web.Response:
        """Answers a refusal as SGLang answers a control request."""
        return web.json_response({"success": False, "message": str(error)}, status=status)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"service": "sidecar", "serving": True})

    async def _give(self, request: web.Request) -> web.StreamResponse:
        """Serves a version's files like the weight store, until two newer versions are here."""
        name, file = request.match_info["name"], request.match_info["file"]
        folder = self._folder / name
        try:
            if parse_version_dir(name) is None:
                raise InvalidInput(f"version {name[:80]!r}: expected vN-incM")
            manifest = await asyncio.to_thread(read_manifest, folder)
        except InvalidInput as error:
            raise NotFound(str(error)) from None
        if file not in {MANIFEST, *(entry.name for entry in manifest.files)}:
            raise NotFound(f"{name}/{file[:80]}: no file of this version")
        return web.FileResponse(folder / file, chunk_size=1 << 20)

    async def _stage(self, request: web.Request) -> web.Response:
        try:
            source = json.loads(await request.read())["model_path"]
        except (ValueError, KeyError, TypeError, RecursionError):
            source = None
        if not isinstance(source, str):
            raise InvalidInput('body: expected {"model_path": "http://host:port/versions/NAME"}')
        async with self._fetching:
            try:
                version = await asyncio.to_thread(
                    fetch_version, source, self.security.headers(), self._folder
                )
            except ArealError as error:
                self._log.warning("fetch_failed", source=source, cause=str(error))
                return self.refusal(request, error, 400)
        return web.json_response({"success": True, "message": "", "model_path": version.path})


async def _serve(sidecar: Sidecar, host: str, port: int) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await sidecar.start(host, port)
    await stop.wait()
    await sidecar.close()


def run() -> None:
    """Serves until a signal."""
    parser = argparse.ArgumentParser(prog="python -m areal.weights.sidecar")
    parser.add_argument("--listen", default="127.0.0.1:30900", help="host:port to listen on.")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm/areal-weights"),  # noqa: S108 - memory, and it may be shared
        help="Folder for versions.",
    )
    parser.add_argument(
        "--token-file", default="", help="File with the token; default: AREAL_TOKEN."
    )
    parser.add_argument(
        "--allow-insecure-bind",
        action="store_true",
        help="Without a token, allow other machines to connect.",
    )
    asked = parser.parse_args()
    configure_logging("sidecar", "")
    security = Security.of_token_file(
        asked.token_file, allow_insecure_bind=asked.allow_insecure_bind
    )
    host, _, port = asked.listen.rpartition(":")
    host = host.strip("[]")
    security.check_bind(host, "--listen")
    # Where all users may write, another one may have prepared a folder of versions for us.
    asked.folder.mkdir(parents=True, exist_ok=True)
    if why := foreign_owner(asked.folder):
        sys.exit(f"--folder {why}; name another folder")
    asyncio.run(_serve(Sidecar(asked.folder, security), host, int(port)))


if __name__ == "__main__":
    run()
