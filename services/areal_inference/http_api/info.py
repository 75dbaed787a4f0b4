"""Read-only endpoints: health, model and server information, load, metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from areal.errors import Unavailable
from areal_inference.api import RESERVED_POSITIONS
from areal_inference.decode.request import Request, SamplingParams
from areal_inference.frontend import Frontend
from areal_inference.http_api.requests import engine_error, guarded, json_response

VERSION = "areal-inference-0.3.0"
_HEALTH_GENERATE_S = 20.0


def info_routes(frontend: Frontend) -> list[StarletteRoute]:
    """Returns all read-only endpoints of a frontend."""
    info = _Info(frontend)
    return [
        StarletteRoute(path, guarded(handler), methods=["GET"])
        for path, handler in (
            ("/health", info.health),
            ("/health_generate", info.health_generate),
            ("/ready", info.ready),
            ("/model_info", info.model_info),
            ("/get_model_info", info.model_info),
            ("/server_info", info.server_info),
            ("/get_server_info", info.server_info),
            ("/v1/loads", info.loads),
            ("/metrics", info.metrics),
            ("/waits", info.waits),
        )
    ]


class _Info:
    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def health(self, _: HttpRequest) -> Response:
        """Answers 200 while the engine works, also in a pause; generates nothing, unlike SGLang."""
        self._frontend.check_health()
        return Response(status_code=200)

    async def ready(self, _: HttpRequest) -> Response:
        """Answers 200 if healthy, not paused, and with its memory."""
        self._frontend.check_health()
        if self._frontend.scheduler.asleep:
            raise Unavailable("memory is released")
        if self._frontend.scheduler.pause_mode is not None:
            raise Unavailable("generation is paused")
        return Response(status_code=200)

    async def health_generate(self, _: HttpRequest) -> Response:
        """Generates one token; 503 after 20 s (also during a pause, as SGLang's)."""
        self._frontend.check_health()
        probe = Request(
            rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
            input_ids=[0],
            params=SamplingParams(max_new_tokens=1, temperature=0.0),
            received_at=time.time(),
        )
        self._frontend.engine.submit([probe])
        try:
            async with asyncio.timeout(_HEALTH_GENERATE_S):
                await probe.woken.wait()
        except TimeoutError:
            await self._frontend.engine.call(
                lambda s: s.abort({probe.rid}, "health check timed out"), _HEALTH_GENERATE_S
            )
            return engine_error(f"no token generated within {_HEALTH_GENERATE_S:g} s", 503)
        if probe.finish is None or probe.finish["type"] == "abort":
            return engine_error(f"probe ended with {probe.finish}", 503)
        return Response(status_code=200)

    async def model_info(self, _: HttpRequest) -> Response:
        """Returns the served model and its weight version."""
        frontend = self._frontend
        tokenizer = frontend.config.model_path if frontend.tokenizer is not None else None
        return json_response(
            {
                "model_path": frontend.model_path,
                "served_model_name": frontend.config.served_model_name or frontend.model_path,
                "tokenizer_path": tokenizer,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": frontend.scheduler.weight_version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": frontend.model.vision is not None,
                "has_audio_understanding": False,
                "model_type": frontend.model.model_type,
                "architectures": [frontend.model.architecture],
            }
        )

    async def server_info(self, _: HttpRequest) -> Response:
        """The configuration (weight_version: at the start) and the live state."""
        frontend = self._frontend
        scheduler = frontend.scheduler
        return json_response(
            {
                **frontend.config.model_dump(),
                "status": "ready" if frontend.ready else "starting",
                "context_length": frontend.context_length,
                "max_total_num_tokens": frontend.max_total_tokens,
                "max_req_input_len": frontend.context_length - RESERVED_POSITIONS,
                "startup_time": frontend.started_at,
                "boot_id": frontend.boot_id,
                "internal_states": [
                    {
                        "weight_version": scheduler.weight_version,
                        "last_gen_throughput": scheduler.throughput,
                        "paused": scheduler.pause_mode,
                        "released": sorted(scheduler.released),
                    }
                ],
                "version": VERSION,
                "frontend": "areal-inference",
            }
        )

    async def loads(self, _: HttpRequest) -> Response:
        """Returns queue lengths and cache use."""
        frontend = self._frontend
        scheduler = frontend.scheduler
        running = list(scheduler.running)
        used = sum(r.length for r in running)
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": VERSION,
                "loads": [
                    {
                        "dp_rank": 0,
                        "num_running_reqs": len(running),
                        "num_waiting_reqs": len(scheduler.waiting) + len(scheduler.held),
                        "num_used_tokens": used,
                        "max_total_num_tokens": frontend.max_total_tokens,
                        "token_usage": used / frontend.max_total_tokens,
                        "gen_throughput": scheduler.throughput,
                    }
                ],
            }
        )

    async def waits(self, _: HttpRequest) -> Response:
        """The oldest request that waits, for the watchdog."""
        return json_response(self._frontend.metrics.waits.as_json("inference"))

    async def metrics(self, _: HttpRequest) -> Response:
        """Returns the metrics in Prometheus's text format."""
        frontend = self._frontend
        text = frontend.metrics.render(frontend.scheduler, frontend.max_total_tokens)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
