"""Adapters (LoRA): load and unload them while requests run, as SGLang does.

A request names its adapter as `lora_path` and keeps it to its end. Unlike in SGLang, unloading does
not wait for such requests, and a request does not load again what was unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from areal.errors import InvalidInput
from areal.weights.publisher import TransportError
from areal_inference.api import SchemaError
from areal_inference.frontend import Frontend
from areal_inference.http_api.requests import COMMON, Route, guarded, json_response, read_object

_LOAD = {**COMMON, "lora_name": str, "lora_path": str, "pinned": bool, "lora_id": str}
_UNLOAD = {**COMMON, "lora_name": str, "lora_id": str}


def adapter_routes(frontend: Frontend, headers: Mapping[str, str]) -> list[StarletteRoute]:
    """Returns the endpoints; `headers` are those that a weight store requires."""
    adapters = _Adapters(frontend, headers)
    routes: list[tuple[str, Route, str]] = [
        ("/load_lora_adapter", adapters.load, "POST"),
        ("/unload_lora_adapter", adapters.unload, "POST"),
    ]
    if frontend.config.enable_lora:
        routes.append(("/v1/models", adapters.models, "GET"))
    return [StarletteRoute(path, guarded(call), methods=[method]) for path, call, method in routes]


class _Adapters:
    def __init__(self, frontend: Frontend, headers: Mapping[str, str]) -> None:
        self._frontend = frontend
        self._headers = headers
        self._loading = asyncio.Lock()

    async def load(self, http: HttpRequest) -> Response:
        """Loads an adapter from `lora_path`, a folder or a version in a store, as `lora_name`."""
        body = await read_object(http, _LOAD)
        name, path = body.get("lora_name", ""), body.get("lora_path", "")
        if not name or not path:
            raise SchemaError("lora_name, lora_path: expected a name, and a folder or a location")
        self._frontend.check_ready()
        async with self._loading:
            try:
                await self._load(name, path)
            except (InvalidInput, TransportError) as error:
                return self._answer(str(error))
        return self._answer("")

    async def _load(self, name: str, path: str) -> None:
        import torch

        from areal_inference.model.adapters import Adapter, read_adapter

        frontend = self._frontend
        if not frontend.config.enable_lora:
            raise InvalidInput("LoRA is not enabled: expected the server's flag --enable-lora")
        if name in frontend.adapters:
            raise InvalidInput(f"lora_name {name[:200]!r}: it is already loaded")
        dtype: torch.dtype = frontend.storage.dtype
        most = frontend.config.max_lora_rank
        pairs = await asyncio.to_thread(read_adapter, path, self._headers, dtype, most)
        # In the engine's thread, whose model this is.
        parts = await frontend.engine.call(
            lambda _: frontend.runner.model.adapt(pairs), frontend.config.command_timeout_s
        )
        frontend.adapters[name] = Adapter(name, path, parts)

    async def unload(self, http: HttpRequest) -> Response:
        """Forgets an adapter; requests that run with it keep it."""
        body = await read_object(http, _UNLOAD)
        name = body.get("lora_name", "")
        self._frontend.check_ready()
        if self._frontend.adapters.pop(name, None) is None:
            return self._answer(f"LoRA with name {name[:200]} does not exist")
        return self._answer("")

    async def models(self, _: HttpRequest) -> Response:
        """OpenAI's list of models: the served one, then each adapter by its name."""
        config = self._frontend.config
        served = config.served_model_name or config.model_path
        cards = [{"id": served, "root": served, "parent": None}]
        cards += [
            {"id": each.name, "root": each.path, "parent": served}
            for each in self._frontend.adapters.values()
        ]
        listed = [{**card, "object": "model", "owned_by": "areal"} for card in cards]
        return json_response({"object": "list", "data": listed})

    def _answer(self, error: str) -> Response:
        loaded = {each.name: each.path for each in self._frontend.adapters.values()}
        body = {"success": not error, "error_message": error, "loaded_adapters": loaded}
        return json_response(body, 400 if error else 200)
