"""The HTTP routes: convert, call, convert. One clear line for every error."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.exposition import generate_latest
from starlette.exceptions import HTTPException

from areal.chassis import tracing
from areal.chassis.http_tracing import TracedRequests
from areal.chassis.waits import Waits
from areal.clients.buffer.admin import BufferAdmin
from areal.clients.buffer.sessions import BufferSessions
from areal.clients.rollout import RolloutClient
from areal.errors import (
    ArealError,
    InvalidInput,
    NotFound,
    Unauthenticated,
    Unavailable,
    retry_headers,
)
from areal.tokenizer.json_text import dumps
from areal_gateway.agents import add_agents, agent_error
from areal_gateway.body_limit import BodyLimit
from areal_gateway.config import GatewayConfig
from areal_gateway.login import DashboardAuth, Sessions, log_in
from areal_gateway.metrics import GatewayMetrics, RequestCount
from areal_gateway.rest import CancelIn, QueryIn, SubmitIn, explain, record_json, task_from_model
from areal_gateway.status import RunStatus

STATIC = Path(__file__).parent / "static"
# The page loads nothing from elsewhere and runs no inline script.
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"


class Json(Response):
    """JSON, with integers of any size."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else dumps(content)


def build_app(
    run: RunStatus,
    rollout: RolloutClient | None,
    dead_letters: BufferAdmin | None,
    metrics: GatewayMetrics,
    waits: Waits,
    config: GatewayConfig,
    sessions: Sessions | None = None,
    agents: BufferSessions | None = None,
) -> FastAPI:
    """Makes the application.

    Args:
        run: Source of status, steps and events.
        rollout: The task API behind /v1/tasks; None: those routes answer 503.
        dead_letters: The ledger's, behind /v1/dead-letters; None: it answers 503.
        metrics: Counters; also what /metrics shows.
        waits: The watchdog's record.
        config: Limits.
        sessions: Checks logins; None: everyone is admitted.
        agents: The ledger's, behind /v1/sessions; None: it answers 503.
    """
    app = FastAPI(
        title="AReaL gateway",
        summary="Tasks, trajectories and the state of a run.",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        default_response_class=Json,
        telemetry={"tracing": False},  # it would begin a trace at every look at the dashboard
    )
    if sessions is not None:
        _add_login(app, sessions)
    app.add_middleware(BodyLimit, limit=config.max_body_bytes)
    app.add_middleware(RequestCount, metrics=metrics, waits=waits)
    if tracing.enabled():
        app.add_middleware(TracedRequests)
    _add_errors(app)
    _add_pages(app, metrics)
    _add_state(app, run, metrics, config)
    _add_tasks(app, rollout)
    _add_dead_letters(app, dead_letters)
    add_agents(app, rollout, agents, config)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Json:
        return Json({"error": explain(list(error.errors()), error.body)}, status_code=400)

    @app.exception_handler(ArealError)
    async def refused(request: Request, error: ArealError) -> Response:
        if (answer := agent_error(request, error)) is not None:
            return answer
        code = error.http_status
        # A service behind the gateway failed, or refused the gateway's own token.
        if code == 500 or isinstance(error, Unauthenticated):
            code = 502
        return Json({"error": str(error)}, status_code=code, headers=retry_headers(error))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        if (answer := agent_error(request, error)) is not None:
            return answer
        # A bug: the trace goes to the log, the client learns where to look.
        text = f"{request.method} {request.url.path}: {type(error).__name__}; see the gateway's log"
        return Json({"error": text}, status_code=500)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        said = InvalidInput(f"{request.method} {request.url.path}: {error.detail}")
        if (answer := agent_error(request, said, error.status_code)) is not None:
            answer.headers.update(error.headers or {})
            return answer
        return Json({"error": str(said)}, status_code=error.status_code, headers=error.headers)


def _add_login(app: FastAPI, sessions: Sessions) -> None:
    app.add_middleware(DashboardAuth, sessions=sessions)

    @app.post("/login", include_in_schema=False)
    async def login(request: Request) -> Response:
        return await log_in(request, sessions)


def _add_pages(app: FastAPI, metrics: GatewayMetrics) -> None:
    @app.get("/", include_in_schema=False)
    async def dashboard() -> FileResponse:
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
        return FileResponse(STATIC / "index.html", headers=headers)

    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/healthz", tags=["operations"])
    async def healthz() -> Json:
        """Whether this process serves; see /v1/status for the other services."""
        return Json({"service": "gateway", "serving": True})

    @app.get("/metrics", include_in_schema=False)
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_state(
    app: FastAPI, run: RunStatus, metrics: GatewayMetrics, config: GatewayConfig
) -> None:
    open_streams = 0

    @app.get("/v1/status", tags=["state"])
    async def status() -> Json:
        """Ledger, servers, versions, trainer and the last step, as of the last second."""
        return Json(run.status_json())

    @app.get("/v1/steps", tags=["state"])
    async def steps(after: int = Query(0, ge=0)) -> Json:
        """Rows of finished train steps above `after`, oldest first."""
        return Json({"steps": run.rows_after(after)})

    @app.get("/v1/events", tags=["state"], response_class=StreamingResponse)
    async def events(after: int = Query(0, ge=0)) -> StreamingResponse:
        """Server-sent events: `history` once, then `steps` and `status` as they come."""
        if open_streams >= config.max_streams:
            raise Unavailable(f"{open_streams} event streams are open: that is the limit")

        async def stream() -> AsyncGenerator[bytes, None]:
            nonlocal open_streams
            open_streams += 1
            metrics.streams.set(open_streams)
            try:
                async for name, body in run.subscribe(after):
                    yield b"event: %s\ndata: %s\n\n" % (name.encode(), body)
            finally:
                open_streams -= 1
                metrics.streams.set(open_streams)

        # A proxy that buffers would turn a live page into a slide show.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def _add_tasks(app: FastAPI, rollout: RolloutClient | None) -> None:
    def calls() -> RolloutClient:
        if rollout is None:
            raise Unavailable("endpoints.rollout '': this gateway has no rollout service")
        return rollout

    async def one(task_id: str, include_trajectories: bool) -> dict[str, Any]:
        records = await calls().get_tasks([task_id], include_trajectories=include_trajectories)
        if not records:
            raise NotFound(f"task {task_id!r}: unknown, or released since it ended")
        return record_json(records[0])

    @app.post("/v1/tasks", tags=["tasks"])
    async def submit(body: SubmitIn) -> Json:
        """Queues tasks. Idempotent by task_id: `accepted` is false for a known id."""
        tasks = [task_from_model(task) for task in body.tasks]
        accepted = await calls().submit_tasks(tasks)
        pairs = zip(tasks, accepted, strict=True)
        return Json({"results": [{"task_id": t.task_id, "accepted": a} for t, a in pairs]})

    @app.get("/v1/tasks/{task_id}", tags=["tasks"])
    async def get(task_id: str, include_trajectories: bool = False) -> Json:
        """Returns one task's record."""
        return Json(await one(task_id, include_trajectories))

    @app.post("/v1/tasks/query", tags=["tasks"])
    async def query(body: QueryIn) -> Json:
        """Records of many tasks; unknown ids are left out."""
        records = await calls().get_tasks(
            body.task_ids, include_trajectories=body.include_trajectories
        )
        return Json({"tasks": [record_json(record) for record in records]})

    @app.post("/v1/tasks/cancel", tags=["tasks"])
    async def cancel(body: CancelIn) -> Json:
        """Cancels live tasks; ended ones stay as they are."""
        count = await calls().cancel_tasks(body.task_ids, reason=body.reason)
        return Json({"cancelled": count})

    @app.get("/v1/trajectories/{task_id}", tags=["tasks"])
    async def trajectories(task_id: str) -> Json:
        """The trajectories of a task that has completed and still has them."""
        record = await one(task_id, include_trajectories=True)
        if "trajectories" not in record:
            raise NotFound(f"task {task_id!r} is {record['state']}: it has no trajectories to read")
        return Json({"task_id": task_id, "trajectories": record["trajectories"]})


def _add_dead_letters(app: FastAPI, admin: BufferAdmin | None) -> None:
    @app.get("/v1/dead-letters", tags=["tasks"])
    async def dead_letters(limit: int = Query(100, ge=1, le=1000)) -> Json:
        """Tasks that failed permanently, newest first: records with `cause` and `traceback`."""
        if admin is None:
            raise Unavailable("endpoints.buffer '': this gateway has no ledger")
        letters = await admin.list_dead_letters(limit)
        return Json(
            {
                "dead_letters": [
                    {**record_json(each.record), "cause": each.cause, "traceback": each.traceback}
                    for each in letters
                ]
            }
        )
