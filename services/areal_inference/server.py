"""Wires the CPU engine: HTTP at once (503), the model when it is loaded, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys

from areal.chassis.http_server import HttpServer, bind
from areal.chassis.logging import get_logger
from areal.security import Security
from areal_inference.cli import command_line
from areal_inference.config import InferenceConfig
from areal_inference.decode.engine import EngineError
from areal_inference.frontend import Frontend, read_model
from areal_inference.http_api.app import build_app

_DRAIN_S = 5.0


class InferenceServer:
    """The process; made in its event loop.

    Raises:
        ConfigError: Port in use, broken tokenizer, no token on an address that others reach.
        ModelError: The model folder is missing, broken or of an unsupported kind.
    """

    def __init__(self, config: InferenceConfig) -> None:
        security = Security.of_token_file(
            config.token_file or "", allow_insecure_bind=config.allow_insecure_bind
        )
        security.check_bind(config.host, "inference.host")
        # The engine releases the interpreter at every tensor operation; it must get it back quickly
        # from the HTTP side, or a burst of requests would stall generation.
        sys.setswitchinterval(0.0005)
        self._stop = asyncio.Event()
        self._failures: list[Exception] = []
        self._frontend = Frontend(config, read_model(config), self._failed)
        self._listener = bind(config.host, config.port, "inference.port")
        self._http = HttpServer(
            build_app(self._frontend, security),
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=int(_DRAIN_S),
            timeout_keep_alive=75,
        )

    def _failed(self, error: Exception) -> None:
        self._failures.append(error)
        self._stop.set()

    @classmethod
    async def serve(cls, config: InferenceConfig) -> int:
        """Serves until stopped; call it in the server's event loop."""
        return await cls(config).run()

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit code: 1 if the engine failed."""
        frontend, log = self._frontend, get_logger(__name__)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        host, port = self._listener.getsockname()[:2]
        log.info("listening", url=f"http://{host}:{port}", model_path=frontend.model_path)
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(frontend.engine.start())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                # What was loaded so far never dies: keep the collector from walking it again.
                gc.freeze()
                frontend.ready = True
                log.info("ready", weight_version=frontend.config.weight_version)
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            log.info("stopping", running=len(frontend.live))
            stopping.cancel()
            await frontend.drain(_DRAIN_S)
            self._http.should_exit = True
            await serving
            # A thread that still loads a model, or sits in a long step, ends with the process.
            with contextlib.suppress(EngineError):
                await frontend.engine.stop(_DRAIN_S)
            loading.cancel()
        for failure in self._failures:
            log.error("engine_failed", exc_info=failure)
        return 1 if self._failures else 0


def main() -> None:
    """Serves until told to stop."""
    command_line(InferenceServer.serve)
