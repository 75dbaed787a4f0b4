"""OpenAI's and Anthropic's routes of a server, for people and tools; training uses /generate.

POST /v1/chat/completions ── messages ──> chat template ──> ids ──> the engine ──> text, tool calls

SGLang has these routes as well.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from areal.agents.asgi import AgentResponse, unless_hung_up
from areal.agents.calls import Calls
from areal.agents.routes import handle
from areal.agents.session import Model, Session
from areal.errors import InvalidInput
from areal.request_fields import body_of, number
from areal.tokenizer import Tokenizer
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.workflows.rendering import TemplateRenderer
from areal_inference.api import GenerateCall, parse_generate
from areal_inference.decode.request import Request
from areal_inference.frontend import Frontend
from areal_inference.http_api.generation import abort_unfinished, updates
from areal_inference.http_api.requests import guarded, read_body

_LIVE_TOKENS = 4
"""Number of tokens between two events of a stream."""
_POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def chat_routes(frontend: Frontend) -> list[StarletteRoute]:
    """The routes that speak text."""
    chat = _Chat(frontend)
    return [
        StarletteRoute("/v1/models", guarded(chat.serve), methods=["GET"]),
        *(StarletteRoute(path, guarded(chat.serve), methods=["POST"]) for path in _POSTS),
    ]


class _Chat:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(Path(self._frontend.config.model_path))

    async def serve(self, http: HttpRequest) -> Response:
        """Serves one request in a session of its own; the client keeps the conversation."""
        content = await read_body(http)

        async def session(_: str) -> Session:
            return self._session(content if http.method == "POST" else b"{}")

        answering = handle(session, http.method, http.url.path, http.headers, content)
        return AgentResponse(await unless_hung_up(http.receive, answering))

    def _session(self, content: bytes) -> Session:
        frontend = self._frontend
        if frontend.tokenizer is None:
            raise InvalidInput("this server has no tokenizer: expected /generate with input_ids")
        room = frontend.context_length
        model = Model(
            frontend.config.served_model_name or frontend.config.model_path,
            self._generate,
            self._tokenizer,
            TemplateRenderer(self._tokenizer),
            _sampling(body_of(content), room),
            context_length=room,
        )
        return Session(uuid.uuid4().hex, model, Calls())

    async def _generate(self, request: LLMRequest) -> list[LLMResponse]:
        frontend, sampling = self._frontend, request.gconfig
        limits = frontend.limits
        room = min(limits.context_length, limits.max_total_tokens) - len(request.input_ids)
        params: dict[str, Any] = {
            "n": sampling.n_samples,
            "max_new_tokens": max(1, min(sampling.max_new_tokens, room)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        live = request.on_tokens is not None
        if live:
            params["stream_interval"] = _LIVE_TOKENS
        if request.grammar:
            params["structural_tag"] = request.grammar
        body = {
            "input_ids": request.input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": live,
        }
        parse = partial(parse_generate, body, limits, None, constrain=frontend.constrain)
        call = await asyncio.to_thread(parse) if request.grammar else parse()
        frontend.start(call)
        try:
            if request.on_tokens is None:
                for one in call.requests:
                    await one.woken.wait()
            else:
                async for index, one in updates(call.requests):
                    request.on_tokens(index, list(one.output_ids))
        finally:
            abort_unfinished(frontend, call)
            frontend.finished(call)
        return _responses(call)


def _sampling(body: Mapping[str, Any], room: int) -> GenerationHyperparameters:
    """Returns the sampling parameters of the request: here, unlike in training, they count."""
    temperature, top_p = number(body, "temperature"), number(body, "top_p")
    return GenerationHyperparameters(
        max_new_tokens=room,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
    )


def _responses(call: GenerateCall) -> list[LLMResponse]:
    return [_response(request) for request in call.requests]


def _response(request: Request) -> LLMResponse:
    reasons = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
    kind = (request.finish or {}).get("type", "abort")
    count = len(request.output_ids)
    return LLMResponse(
        request.input_ids,
        request.output_ids,
        request.logprobs,
        [-1] * count,  # no one trains on these
        reasons.get(kind, StopReason.ABORT),
    )
