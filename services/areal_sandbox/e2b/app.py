"""The HTTP application: E2B's control API, and envd of the box that a request names.

| request                                   | does                                            |
|-------------------------------------------|-------------------------------------------------|
| POST /sandboxes, /v2/sandboxes            | lends a box                                     |
| GET /sandboxes, /v2/sandboxes, …/ID       | lists boxes, describes one                      |
| POST …/ID/timeout, …/ID/connect           | puts the end off                                |
| DELETE /sandboxes/ID                      | destroys the box                                |
| GET, POST /files?path=…                   | reads, writes a file                            |
| POST /process.Process/METHOD              | commands (envd.py)                              |
| POST /filesystem.Filesystem/METHOD        | files (envd.py)                                 |
| GET /health                               | 204: the box is there                           |

The first four ask for the token (X-API-Key, or a bearer); the others for the box's own, which
`POST /sandboxes` returned (X-Access-Token), and name the box in E2b-Sandbox-Id.
"""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from urllib.parse import parse_qsl

from aiohttp import web

from areal.chassis.http_app import HttpApp
from areal.errors import ArealError, InvalidInput, NotFound, Unauthenticated
from areal.protocol.boxes import Limits
from areal.request_fields import texts_by_name
from areal.security import Security
from areal_sandbox.e2b import connect
from areal_sandbox.e2b.connect import Json
from areal_sandbox.e2b.envd import Filesystem, Process
from areal_sandbox.files import MAX_BYTES, Files
from areal_sandbox.leases import Lease, Leases

_ENVD = "0.5.7"  # the newest whose calls are all answered here
_TEMPLATES = ("base", "code-interpreter-v1")
_LIMITS = Limits(
    seconds=86_400,
    memory_mb=1024,
    processes=128,
    output_kb=16 << 10,
    disk_mb=512,
    cpu_seconds=86_400,
)
"""Limits of a box that the SDK requests; the SDK cannot set them."""


class E2BApp(HttpApp):
    """Serves one process's leases."""

    def __init__(self, leases: Leases, security: Security) -> None:
        super().__init__(security, max_body_bytes=MAX_BYTES + (1 << 20), cancel_handlers=True)
        self._leases = leases

    def routes(self) -> list[web.RouteDef]:
        one = "/sandboxes/{id}"
        routes = [web.get("/health", self._health), web.delete(one, self._kill)]
        for version in ("", "/v2"):
            routes += [
                web.post(f"{version}/sandboxes", self._create),
                web.get(f"{version}/sandboxes", self._list),
                web.get(f"{version}{one}", self._describe),
                web.post(f"{version}{one}/connect", self._connect),
            ]
        routes += [
            web.post(f"{one}/timeout", self._timeout),
            web.get("/files", self._read),
            web.post("/files", self._write),
            web.post("/process.Process/{method}", self._process),
            web.post("/filesystem.Filesystem/{method}", self._filesystem),
        ]
        return routes

    def admits(self, request: web.Request) -> bool:
        """A box's own calls show its token, which `_lease` checks."""
        key = request.headers.get("X-API-Key")
        bearer = f"Bearer {key}" if key else request.headers.get("Authorization")
        return not _is_control(request) or self.security.admits(bearer)

    def refusal(self, request: web.Request, error: ArealError, status: int) -> web.Response:
        """In the format of the API that the path belongs to."""
        if _is_control(request) or request.path in ("/files", "/health"):
            return web.json_response({"code": status, "message": str(error)}, status=status)
        return connect.refusal(error, status)

    # -- control --------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        body = connect.parse(await request.read())
        template = body.get("templateID", "base")
        if template not in _TEMPLATES:
            raise InvalidInput(f"templateID {template!r}: expected one of {', '.join(_TEMPLATES)}")
        if body.get("volumeMounts") or body.get("mcp"):
            raise InvalidInput("volumeMounts, mcp: not supported; leave them out")
        lease = await self._leases.create(
            _LIMITS,
            connect.seconds(body.get("timeout", 0), "timeout"),
            texts_by_name(body, "envVars"),
            texts_by_name(body, "metadata"),
        )
        return web.json_response(_made(lease), status=201)

    async def _list(self, request: web.Request) -> web.Response:
        wanted = dict(parse_qsl(request.query.get("metadata", "")))
        found = [
            _described(lease)
            for lease in self._leases.all()
            if wanted.items() <= dict(lease.metadata).items()
        ]
        return web.json_response(found)

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response(_described(self._leases.get(request.match_info["id"])))

    async def _kill(self, request: web.Request) -> web.Response:
        if not await self._leases.kill(request.match_info["id"]):
            raise NotFound(f"sandbox {request.match_info['id']!r}: no such box")
        return web.Response(status=204)

    async def _timeout(self, request: web.Request) -> web.Response:
        body = connect.parse(await request.read())
        seconds = connect.seconds(body.get("timeout", 0), "timeout")
        self._leases.keep(request.match_info["id"], seconds)
        return web.Response(status=204)

    async def _connect(self, request: web.Request) -> web.Response:
        body = connect.parse(await request.read())
        seconds = connect.seconds(body.get("timeout", 0), "timeout")
        lease = self._leases.get(request.match_info["id"])
        if seconds > lease.until - datetime.now(UTC).timestamp():  # never earlier than it was
            self._leases.keep(lease.id, seconds)
        return web.json_response(_made(lease))

    # -- envd -----------------------------------------------------------------------------------

    def _lease(self, request: web.Request) -> Lease:
        """The box that a request names; HTTP errors as of E2B's own proxy."""
        name = request.headers.get("E2b-Sandbox-Id", "")
        try:
            lease = self._leases.get(name)
        except NotFound:
            gone = {"code": 502, "message": "The sandbox was not found", "sandboxId": name}
            raise web.HTTPBadGateway(
                text=web.json_response(gone).text, content_type="application/json"
            ) from None
        given = request.headers.get("X-Access-Token", "")
        if not hmac.compare_digest(given.encode(), lease.token.encode()):
            raise Unauthenticated("X-Access-Token: expected the box's")
        return lease

    async def _health(self, request: web.Request) -> web.Response:
        self._lease(request)
        return web.Response(status=204)

    async def _read(self, request: web.Request) -> web.Response:
        content = await Files(self._lease(request)).read(request.query.get("path", ""))
        return web.Response(body=content, content_type="application/octet-stream")

    async def _write(self, request: web.Request) -> web.Response:
        files, path, written = Files(self._lease(request)), request.query.get("path", ""), []
        if request.content_type.startswith("multipart/"):
            try:
                form = await request.post()
            except ValueError as error:
                raise InvalidInput(f"body: {error}: expected a form") from None
            for part in form.getall("file", []):
                if not isinstance(part, web.FileField):
                    raise InvalidInput("file: expected a file, not a text field")
                written.append(await files.write(path or part.filename, part.file.read()))
        else:
            written.append(await files.write(path, await request.read()))
        found = [
            {"name": each.path.rpartition("/")[2], "type": "file", "path": each.path}
            for each in written
        ]
        return web.json_response(found)

    async def _process(self, request: web.Request) -> web.StreamResponse:
        process, method = Process(self._leases, self._lease(request)), request.match_info["method"]
        if call := process.unary.get(method):
            return web.json_response(await call(connect.parse(await request.read())))
        if method == "StreamInput":
            return await connect.stream(request, process.stream_input(connect.messages(request)))
        streams = {"Start": process.start, "Connect": process.connect}
        if method not in streams:
            raise web.HTTPNotFound
        message: Json = {}
        async for each in connect.messages(request):
            message = each
        limit = request.headers.get("Connect-Timeout-Ms", 0)
        seconds = connect.seconds(limit, "Connect-Timeout-Ms") / 1000
        return await connect.stream(request, streams[method](message, seconds))

    async def _filesystem(self, request: web.Request) -> web.Response:
        call = Filesystem(self._lease(request)).unary.get(request.match_info["method"])
        if call is None:
            raise web.HTTPNotFound
        return web.json_response(await call(connect.parse(await request.read())))


def _is_control(request: web.Request) -> bool:
    return "sandboxes" in request.path.split("/")[1:3]


def _made(lease: Lease) -> Json:
    return {
        "templateID": _TEMPLATES[0],
        "sandboxID": lease.id,
        "clientID": "areal",
        "envdVersion": _ENVD,
        "envdAccessToken": lease.token,
    }


def _described(lease: Lease) -> Json:
    times = [
        datetime.fromtimestamp(each, UTC).isoformat().replace("+00:00", "Z")
        for each in (lease.began, lease.until)
    ]
    return _made(lease) | {
        "startedAt": times[0],
        "endAt": times[1],
        "cpuCount": 1,
        "memoryMB": lease.limits.memory_mb,
        "diskSizeMB": lease.limits.disk_mb,
        "state": "running",
        "metadata": dict(lease.metadata),
    }
