"""Sessions of outside agents: opened here, their calls passed on to a rollout worker.

    POST /v1/sessions ── the gateway's token ──> ids, base URLs, API keys
    /sessions/ID/…    ── the session's own key ──> what `areal.agents.routes` serves

All state is the ledger's: any gateway and any worker serve any request of any session.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from areal.agents import headers
from areal.agents.asgi import AgentResponse, unless_hung_up
from areal.agents.replies import Parts, Reply, failure, frame, is_anthropic, refused
from areal.chassis.logging import get_logger
from areal.clients.buffer.sessions import BufferSessions
from areal.clients.rollout import RolloutClient
from areal.errors import ArealError, InvalidInput, Unavailable
from areal.tokenizer.json_text import dumps
from areal.types import Purpose, Task, WorkflowSpec
from areal.v1.buffer_service_pb2 import UpdateSessionRequest
from areal.v1.rollout_service_pb2 import CallSessionRequest, CallSessionResponse
from areal_gateway.config import GatewayConfig
from areal_gateway.rest import JsonObject
from areal_gateway.session_bodies import SessionBodies


async def _reply_of(
    first: CallSessionResponse, rest: AsyncGenerator[CallSessionResponse], path: str
) -> Reply:
    """A worker's answer, on its way to the agent."""

    async def parts() -> AsyncGenerator[bytes]:
        async for more in rest:
            yield more.body

    def failed(error: Exception) -> bytes:
        if not isinstance(error, ArealError):
            get_logger(__name__).error("agent_stream_failed", exc_info=error)
        named, anthropic = path.endswith("/responses"), is_anthropic(path)
        typed = named or anthropic
        return frame(failure(error, typed=typed, anthropic=anthropic)[1], typed)

    reply = Reply(first.status, first.body, first.stream, first.headers)
    if reply.stream:
        return replace(reply, parts=Parts(parts(), failed, rest.aclose))
    await rest.aclose()
    return reply


async def _record(sessions: BufferSessions, receipt: bytes) -> None:
    # Without this record the answer counts as lost if the client asks again.
    with suppress(ArealError):
        await sessions.update(UpdateSessionRequest.FromString(receipt))


def agent_error(request: Request, error: Exception, status: int | None = None) -> Response | None:
    """Answers a session's agent with an error, in the format of the API that it calls.

    Args:
        request: The request; None is returned for one that is not of a session's agent.
        error: What went wrong.
        status: Its status, where that is known; else the one of the error's class.
    """
    path = request.url.path
    if not path.startswith("/sessions/"):
        return None
    return AgentResponse(refused(error, path, status))


def _api_keys(salt: bytes, given: str, n: int) -> list[str]:
    """The keys of a session's attempts.

    Any gateway derives them again for the client that lost the answer. It takes both the salt,
    which only the ledger has, and the idempotency key, which only the client has.
    """
    digests = (hmac.digest(salt, f"{number} {given}".encode(), "sha256") for number in range(n))
    return [f"sk-{base64.urlsafe_b64encode(digest[:24]).decode()}" for digest in digests]


class OpenIn(BaseModel):
    """A session to open."""

    model_config = ConfigDict(extra="forbid")

    task: JsonObject = Field(default_factory=dict)
    """What the agent works on: kept with the trajectories, for people."""
    n: int = Field(default=1, ge=1, le=64)
    """Attempts at the task, each a session of its own. They are one group: their rewards are
    compared with each other."""
    ttl_s: float | None = Field(default=None, ge=0.1, le=7 * 24 * 3600)
    """The task expires when no call comes for this many seconds, and after 10 minutes if there has
    been no call at all; null: twice rollout.request_timeout_s."""
    purpose: Literal["train", "serve"] = "train"
    """`serve`: recorded, and not trained on."""


def add_agents(
    app: FastAPI,
    rollout: RolloutClient | None,
    sessions: BufferSessions | None,
    config: GatewayConfig,
) -> None:
    """Adds the routes; without rollout service or ledger they answer 503."""
    bodies = SessionBodies(sessions, config)

    @app.post("/v1/sessions", tags=["sessions"])
    async def open_session(request: Request, body: OpenIn | None = None) -> Response:
        """Opens n sessions for an agent; 429 with Retry-After if there is no room for them yet.

        A request that is repeated with the same header `Idempotency-Key` gets the same sessions.
        """
        if sessions is None:
            raise Unavailable("endpoints.buffer '': this gateway has no ledger")
        body = body or OpenIn()
        given = request.headers.get("idempotency-key", uuid.uuid4().hex)
        if not 1 <= len(given) <= 255:
            raise InvalidInput(f"Idempotency-Key: got {len(given)} characters, expected 1 to 255")
        task_id = f"session-{hashlib.sha256(given.encode()).hexdigest()[:32]}"
        task = Task(task_id, Purpose(body.purpose), WorkflowSpec("session"), body.task)
        salt = secrets.token_bytes(32)
        digests = [
            hashlib.sha256(key.encode()).hexdigest() for key in _api_keys(salt, given, body.n)
        ]
        idle_s = body.ttl_s or 2 * config.generation_s
        found = await sessions.open(task, digests, idle_s, salt)
        keys = _api_keys(found.salt, given, body.n)
        opened = [
            {
                "id": f"{task_id}-{attempt}",
                "base_url": f"{request.base_url}sessions/{task_id}-{attempt}/v1",
                "api_key": key,
            }
            for attempt, key in enumerate(keys)
        ]
        answer = {
            **opened[0],
            "task_id": task_id,
            "policy_version": found.policy_version,
            "ttl_s": idle_s,
            "sessions": opened,
        }
        return Response(dumps(answer), media_type="application/json")

    async def call(session_id: str, request: Request, path: str = "") -> Response:
        """A request of the session's agent, which has the session's own key."""
        if rollout is None:
            raise Unavailable("endpoints.rollout '': this gateway has no rollout service")
        async with bodies.of(session_id, request) as body:
            passed = CallSessionRequest(
                session_id=session_id,
                method=request.method,
                path=f"/{path}" if path else "",
                headers={
                    name: request.headers[name] for name in headers.READ if name in request.headers
                },
                content=body or b"",
            )
            replies = rollout.call_session(passed, wait_s=2 * config.generation_s)
            # Without its body, a request is refused at once, and nothing more of it is read.
            first = anext(replies)
            answer = await (first if body is None else unless_hung_up(request.receive, first))
        reply = await _reply_of(answer, replies, path)
        if body is None:
            reply = replace(reply, headers={**reply.headers, "Connection": "close"})
        if sessions is not None and answer.receipt:
            reply = replace(reply, delivered=partial(_record, sessions, answer.receipt))
        return AgentResponse(reply)

    for path in ("/sessions/{session_id}", "/sessions/{session_id}/{path:path}"):
        app.add_api_route(path, call, methods=["GET", "POST"], include_in_schema=False)
